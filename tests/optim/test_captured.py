"""What a captured step notices: that is plain comparing, played here over parameters on the CPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from pagedopt.optim.capture import CapturedStep
from pagedopt.optim.gather import members
from pagedopt.optim.launch import Launch
from pagedopt.optim.numbers import HostNumbers
from pagedopt.optim.plan import Plan
from tests.acts import GROUPS, STATE, TENSORS, absent, add_group, one, parameter_data, set_groups, with_gaps
from tests.loads import HOME
from tests.specs import CASES
from tests.world import RESIDENT, Act, World

Captured = tuple[World, CapturedStep]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """The last parameter has had no gradient yet."""
    monkeypatch.setattr(HostNumbers, "differences", lambda numbers, optimizer: [], raising=False)
    monkeypatch.setattr(HostNumbers, "is_told", True, raising=False)
    world = World(CASES["adamw"], RESIDENT)
    world.step(absent(lambda _: (5,)))
    plan, found, ready = Plan.of(world.optimizer, everyone := members(world.optimizer), lambda *_: False, None)
    return world, CapturedStep(plan.prepare(world.optimizer, found, ready), everyone)


OTHERS = "groups, their parameters, their rules or formats are others"
EDITS: dict[str, tuple[Act, str]] = {
    "state replaced": (one(TENSORS["clone"], 0), "state 'exp_avg' of parameter 1 was replaced"),
    "state moved": (one(TENSORS["data"], -1, 2), "state 'exp_avg_sq' of parameter 2 has moved"),
    "parameters moved": (parameter_data, "parameter 0 has moved"),
    "state deleted": (STATE["delete"], "state 'step' of parameter 1 was replaced"),
    "a group more": (add_group, OTHERS),
    "another order": (GROUPS["list reversed"], OTHERS),
    "another rule": (set_groups(1, amsgrad=True), OTHERS),
    "loaded": (HOME["load"], "state 'step' of parameter 0 was replaced"),  # counts are new tensors, as in torch
    "a late gradient": (
        lambda w: setattr(w.params[5], "grad", torch.ones(70)), "parameter 5 has a gradient, and had no state",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), EDITS.values(), ids=EDITS)
def test_what_makes_it_void_is_named(played: Captured, edit: Act, words: str) -> None:
    world, captured = played
    assert not captured.void(world.optimizer)
    edit(world)
    assert words in captured.void(world.optimizer)
    assert captured.changes(world.optimizer) == captured.void(world.optimizer)
    with pytest.raises(RuntimeError, match=f"is void: .*{words}.*Capture again"):
        captured.refresh(world.optimizer)


def test_gradients_that_no_captured_kernel_can_read_are_refused_first(
    played: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, captured = played
    monkeypatch.setattr(Launch, "follow", lambda *_: pytest.fail("the list was rewritten"), raising=False)
    world.params[1].grad = with_gaps(torch.ones(13, 18))
    with pytest.raises(ValueError, match=r"gradient of parameter 1 has shape \(13, 18\) and strides \(36, 2\)"):
        captured.refresh(world.optimizer)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
def test_a_gradient_of_another_dtype_is_refused(played: Captured) -> None:
    world, captured = played
    p = world.params[1]
    p.grad, p.grad_dtype = None, torch.bfloat16
    p.grad = torch.ones_like(p, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"the gradient of parameter 1 is torch.bfloat16, the captured one reads"):
        captured.refresh(world.optimizer)


def test_a_refresh_that_was_broken_off_is_named(played: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    world, captured = played
    monkeypatch.setattr(HostNumbers, "is_told", False)
    assert captured.changes(world.optimizer) == ["a refresh was broken off"]


def test_gradients_that_move_or_go_are_no_reason_to_capture_again(played: Captured) -> None:
    world, captured = played
    assert not captured.changes(world.optimizer)
    world.params[0].grad, world.params[2].grad = torch.ones_like(world.params[0]), None
    world.state[world.params[5]]  # looking up what is not there makes an empty entry, and that is all
    assert not captured.void(world.optimizer)
    assert captured.changes(world.optimizer) == [f"the gradient of parameter {i} has moved" for i in (0, 2)]


def test_values_may_change(played: Captured) -> None:
    world, captured = played
    world.optimizer.step()
    world.params[0].data.zero_()
    world.state[world.params[1]]["exp_avg"].fill_(2.0)
    assert not captured.changes(world.optimizer)


def test_it_keeps_alive_what_its_lists_name(played: Captured) -> None:
    world, _ = played
    there = [weakref.ref(t) for p in world.params[:5] for t in (p, p.grad, *world.state[p].values())]
    world.optimizer.zero_grad()
    world.held.clear()
    world.state.clear()
    assert all(ref() is not None for ref in there)
