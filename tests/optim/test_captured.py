"""What a captured step notices: that is plain comparing, played here over parameters on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedopt import PagedAdamW
from pagedopt.optim.capture import CapturedStep
from pagedopt.optim.gather import members
from pagedopt.optim.launch import Launch
from pagedopt.optim.numbers import HostNumbers
from pagedopt.optim.plan import Plan

Params = list[torch.nn.Parameter]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> tuple[Params, Any, CapturedStep]:
    monkeypatch.setattr(HostNumbers, "differences", lambda numbers, optimizer: [], raising=False)
    monkeypatch.setattr(HostNumbers, "is_told", True, raising=False)
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    late = torch.nn.Parameter(torch.randn(2))
    optimizer = PagedAdamW([{"params": params[:2]}, {"params": [params[2], late]}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    plan, found, ready = Plan.of(optimizer, everyone := members(optimizer), lambda *_: False, None)
    return [*params, late], optimizer, CapturedStep(plan.prepare(optimizer, found, ready), everyone)


def replace_state(params: Params, optimizer: Any) -> None:
    optimizer.state[params[1]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"].clone()


def move_state(params: Params, optimizer: Any) -> None:
    state = optimizer.state[params[2]]["exp_avg_sq"]
    state.data = state.data.clone()


def move_parameter(params: Params, optimizer: Any) -> None:
    params[0].data = params[0].data.clone()


def delete_state(params: Params, optimizer: Any) -> None:
    del optimizer.state[params[0]]


def add_group(params: Params, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def swap(params: Params, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def another_rule(params: Params, optimizer: Any) -> None:
    optimizer.param_groups[1]["amsgrad"] = True


def load(params: Params, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())  # step counts are new tensors, as in torch


def late_gradient(params: Params, optimizer: Any) -> None:
    params[3].grad = torch.ones_like(params[3])


OTHERS = "groups, their parameters, their rules or formats are others"
EDITS: list[tuple[Callable[[Params, Any], None], str]] = [
    (replace_state, "state 'exp_avg' of parameter 1 was replaced"),
    (move_state, "state 'exp_avg_sq' of parameter 2 has moved"),
    (move_parameter, "parameter 0 has moved"),
    (delete_state, "state 'step' of parameter 0 was replaced"),
    (add_group, OTHERS),
    (swap, OTHERS),
    (another_rule, OTHERS),
    (load, "state 'step' of parameter 0 was replaced"),
    (late_gradient, "parameter 3 has a gradient, and had no state"),
]


@pytest.mark.parametrize(("edit", "words"), EDITS, ids=[edit.__name__ for edit, _ in EDITS])
def test_what_makes_it_void_is_named(
    world: tuple[Params, Any, CapturedStep], edit: Callable[[Params, Any], None], words: str
) -> None:
    params, optimizer, captured = world
    assert not captured.void(optimizer)
    edit(params, optimizer)
    assert words in captured.void(optimizer)
    assert captured.changes(optimizer) == captured.void(optimizer)
    with pytest.raises(RuntimeError, match=f"is void: .*{words}.*Capture again"):
        captured.refresh(optimizer)


def test_gradients_that_no_captured_kernel_can_read_are_refused_first(
    world: tuple[Params, Any, CapturedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer, captured = world
    monkeypatch.setattr(Launch, "follow", lambda *_: pytest.fail("the list was rewritten"), raising=False)
    params[1].grad = torch.ones(10)[::2]
    with pytest.raises(ValueError, match=r"gradient of parameter 1 has shape \(5,\) and strides \(2,\)"):
        captured.refresh(optimizer)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
def test_a_gradient_of_another_dtype_is_refused(world: tuple[Params, Any, CapturedStep]) -> None:
    params, optimizer, captured = world
    params[1].grad, params[1].grad_dtype = None, torch.bfloat16
    params[1].grad = torch.ones_like(params[1], dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"the gradient of parameter 1 is torch.bfloat16, the captured one reads"):
        captured.refresh(optimizer)


def test_a_refresh_that_was_broken_off_is_named(
    world: tuple[Params, Any, CapturedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer, captured = world
    monkeypatch.setattr(HostNumbers, "is_told", False)
    assert captured.changes(optimizer) == ["a refresh was broken off"]


def test_gradients_that_move_or_go_are_no_reason_to_capture_again(world: tuple[Params, Any, CapturedStep]) -> None:
    params, optimizer, captured = world
    assert not captured.changes(optimizer)
    params[0].grad, params[2].grad = torch.ones_like(params[0]), None
    optimizer.state[params[3]]  # looking up what is not there makes an empty entry, and that is all
    assert not captured.void(optimizer)
    assert captured.changes(optimizer) == [f"the gradient of parameter {i} has moved" for i in (0, 2)]


def test_values_may_change(world: tuple[Params, Any, CapturedStep]) -> None:
    params, optimizer, captured = world
    optimizer.step()
    params[0].data.zero_()
    optimizer.state[params[1]]["exp_avg"].fill_(2.0)
    assert not captured.changes(optimizer)


def test_it_keeps_alive_what_its_lists_name(world: tuple[Params, Any, CapturedStep]) -> None:
    import weakref

    params, optimizer, _ = world
    watched = [weakref.ref(t) for p in params[:3] for t in (p, p.grad, *optimizer.state[p].values())]
    optimizer.zero_grad()
    optimizer.state.clear()
    assert all(watch() is not None for watch in watched)
