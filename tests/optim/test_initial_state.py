"""State that starts at another value than zero: Adagrad, beside torch's; and state that is made with its optimizer."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
from optim_support import step_on

from pagedopt import PagedAdagrad, PagedAdamW
from pagedopt.optim.launch import Work
from pagedopt.placements import store as stores
from tests.acts import absent, set_groups
from tests.loads import MOVES
from tests.specs import BY_STATE, CASES, Case
from tests.world import RESIDENT, SIDES, Params, Side, World, Worlds, groups_of, parameters


def own_starts(params: Params) -> list[dict[str, Any]]:
    first, second = groups_of(params)
    return [first, {**second, "initial_accumulator_value": 0.7}]


def filled(world: World) -> None:
    """Torch makes all state with its optimizer, of the constructor's value."""
    for group in () if world.ours else world.groups:
        for p in group["params"]:
            world.state[p]["sum"].fill_(group["initial_accumulator_value"])


def join(world: World) -> None:
    p = world.newcomer()
    world.optimizer.add_param_group({"params": [p], "initial_accumulator_value": 0.9})
    if not world.ours:
        world.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, 0.9)}


def test_a_group_has_a_first_value_of_its_own() -> None:
    worlds = Worlds(CASES["adagrad"], *SIDES, groups=own_starts).do(filled).step(2).do(join).step(2)
    assert not worlds.over


class FromTwo(PagedAdagrad):
    """It starts with a number, whatever the group says."""

    initial: ClassVar = {"sum": 2.0}


def test_a_number_counts_for_all_groups() -> None:
    params = parameters()
    optimizer = FromTwo(own_starts(params), device_budget=0)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    step_on(optimizer, 0)
    assert all((optimizer.state[p]["sum"] == 2.0).all() for p in params)


# --- ``preallocate=True``: state is made with the optimizer, and a step finds it as if it had made it itself ----------


def params_of() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((70_001,), (13, 7), (3,), ())]


def train(params: list[torch.nn.Parameter], optimizer: Any, steps: int = 4) -> None:
    """The last parameter has its first gradient in the third step, the one before it never has one."""
    torch.manual_seed(1)
    for step in range(steps):
        for i, p in enumerate(params):
            grad = torch.randn(p.shape)
            p.grad = None if i == 2 or (i == 3 and step < 2) else grad
        optimizer.step()


@pytest.mark.parametrize("case", [*BY_STATE.values(), CASES["sgd"]], ids=str)
def test_steps_and_state_are_those_without(case: Case) -> None:
    """Wherever state is; the last parameter has its first gradient in the third step, another never has one."""
    options: tuple[dict[str, Any], ...] = ({"preallocate": True}, {"preallocate": True, "state_format": "float32"})
    sides = [Side(f"{how}, {share}", how, share) for how in options for share in (None, 0, 0.5)]
    worlds = Worlds(case, RESIDENT, *sides)
    assert not any(world.optimizer.state_dict()["state"] for world in worlds.ours)
    assert not worlds.step(4, absent(lambda step: (2, 5) if step < 2 else (2,))).over


def test_the_first_step_makes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of()
    optimizer = PagedAdamW(params, preallocate=True)
    monkeypatch.setattr(stores.Store, "create", lambda *_: pytest.fail("state was made"))
    train(params, optimizer)
    assert set(optimizer.preallocated) == {params[2]}


def test_it_counts_before_the_first_step() -> None:
    params = params_of()
    nbytes = 8 * sum(p.numel() for p in params)
    optimizer = PagedAdamW(params, placement="file", device_budget="50%", preallocate=True)
    before = optimizer.memory_report().by_place
    assert sum(before.values()) >= nbytes
    train(params, optimizer)
    assert optimizer.memory_report().by_place == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.set_device_budget(0)
        train(params, optimizer)


def test_a_group_that_is_added_gets_its_own() -> None:
    params, late = params_of(), params_of()
    optimizer = PagedAdamW(params, preallocate=True)
    optimizer.add_param_group({"params": late, "lr": 0.1})
    assert set(optimizer.preallocated) == {*params, *late}


PREALLOCATED = Side("preallocated", {"preallocate": True})


def test_what_no_longer_fits_is_made_again() -> None:
    worlds = Worlds(CASES["adamw"], RESIDENT, PREALLOCATED).do(set_groups(amsgrad=True)).step(4)
    assert all("max_exp_avg_sq" in world.state[world.params[0]] for world in worlds.ours)


def test_a_loaded_state_takes_its_place() -> None:
    without = absent(lambda _: (2,))
    worlds = Worlds(CASES["adamw"], RESIDENT, PREALLOCATED).step(3, without).do(MOVES["a new one"])
    (_, made) = worlds.ours
    assert [*made.optimizer.preallocated] == [made.params[2]]
    assert not worlds.step(2, without).over


def test_parameters_that_require_no_gradient_get_none() -> None:
    params = params_of()
    params[0].requires_grad_(False)
    assert set(PagedAdamW(params, preallocate=True).preallocated) == set(params[1:])


def test_a_step_that_fails_before_it_begins_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of()
    optimizer = PagedAdamW(params, preallocate=True)
    held = {id(t) for entry in optimizer.preallocated.values() for t in entry.values()}
    with monkeypatch.context() as patch:
        patch.setattr("pagedopt.launch.sweep.Sweep.launch", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(params, optimizer, 1)
    assert not optimizer.state
    assert {id(t) for entry in optimizer.preallocated.values() for t in entry.values()} == held
    train(params, optimizer)


def test_state_of_a_step_that_failed_in_the_middle_is_not_taken_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    optimizer = PagedAdamW(params, lr=0.1, preallocate=True)
    empty = optimizer.state_dict()
    for p in params:
        p.grad = torch.ones_like(p)
    launched: list[Work] = []

    def fail(self: Work, arenas: Any) -> None:
        if launched:
            raise MemoryError("the second")
        launched.append(self)
        launch(self, arenas)

    launch = Work.run
    with monkeypatch.context() as patch:
        patch.setattr(Work, "run", fail)
        with pytest.raises(MemoryError, match="the second"):
            optimizer.step()
    assert "failed in the middle" in optimizer.damaged
    optimizer.load_state_dict(empty)
    optimizer.step()
    assert [[float(t.max()) for t in optimizer.state[p].values()] for p in params] == [
        pytest.approx([1, 0.1, 0.001])] * 2  # fmt: skip


def test_it_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="preallocate is 1; it must be True or False"):
        PagedAdamW(params_of(), preallocate=1)


def test_where_there_is_no_room_there_is_no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("the host gave no 560,008 bytes")

    monkeypatch.setattr(stores.Store, "create", full)
    with pytest.raises(MemoryError, match="560,008 bytes"):
        PagedAdamW(params_of(), preallocate=True)
    optimizer = PagedAdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.preallocate = True
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": params_of()})
    assert len(optimizer.param_groups) == 1


def test_nothing_is_captured_where_there_is_no_graph() -> None:
    optimizer = PagedAdamW(params_of())
    optimizer.check_capture()
    with pytest.raises(RuntimeError, match="no captured step of this PagedAdamW is alive"):
        optimizer.refresh()
