"""``preallocate=True``: state is made with the optimizer, and a step finds it as if it had made it itself."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from optim_support import same

from pagedopt import PagedAdamW
from pagedopt.optim.launch import Work
from pagedopt.placements import store as stores
from tests.acts import absent
from tests.optim.test_numbers import NADAM
from tests.specs import BY_STATE, CASES, Case
from tests.world import RESIDENT, Side, Worlds


def parameters() -> list[torch.nn.Parameter]:
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


@pytest.mark.parametrize("case", [*BY_STATE.values(), CASES["sgd"], NADAM], ids=str)
def test_steps_and_state_are_those_without(case: Case) -> None:
    """Wherever state is; the last parameter has its first gradient in the third step, another never has one."""
    options: tuple[dict[str, Any], ...] = ({"preallocate": True}, {"preallocate": True, "state_format": "float32"})
    sides = [Side(f"{how}, {share}", how, share) for how in options for share in (None, 0, 0.5)]
    worlds = Worlds(case, RESIDENT, *sides)
    assert not any(world.optimizer.state_dict()["state"] for world in worlds.ours)
    assert not worlds.step(4, absent(lambda step: (2, 5) if step < 2 else (2,))).over


def test_the_first_step_makes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = PagedAdamW(params, preallocate=True)
    monkeypatch.setattr(stores.Store, "create", lambda *_: pytest.fail("state was made"))
    train(params, optimizer)
    assert set(optimizer.preallocated) == {params[2]}


def test_it_counts_before_the_first_step() -> None:
    params = parameters()
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
    params, late = parameters(), parameters()
    optimizer = PagedAdamW(params, preallocate=True)
    optimizer.add_param_group({"params": late, "lr": 0.1})
    assert set(optimizer.preallocated) == {*params, *late}


def test_what_no_longer_fits_is_made_again() -> None:
    ours, theirs = parameters(), parameters()
    mine, other = PagedAdamW(ours, preallocate=True), PagedAdamW(theirs)
    for optimizer in (mine, other):
        optimizer.param_groups[0]["amsgrad"] = True
    train(ours, mine)
    train(theirs, other)
    assert same(ours, theirs)
    assert "max_exp_avg_sq" in mine.state[ours[0]]


def test_a_loaded_state_takes_its_place() -> None:
    ours, theirs = parameters(), parameters()
    other = PagedAdamW(theirs)
    train(theirs, other)
    mine = PagedAdamW(ours, preallocate=True)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
    mine.load_state_dict(other.state_dict())
    assert set(mine.preallocated) == {ours[2]}
    train(ours, mine)
    train(theirs, other)
    assert same(ours, theirs)


def test_parameters_that_require_no_gradient_get_none() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    assert set(PagedAdamW(params, preallocate=True).preallocated) == set(params[1:])


def test_a_step_that_fails_before_it_begins_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
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


def test_where_there_is_no_room_there_is_no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("the host gave no 560,008 bytes")

    monkeypatch.setattr(stores.Store, "create", full)
    with pytest.raises(MemoryError, match="560,008 bytes"):
        PagedAdamW(parameters(), preallocate=True)
    optimizer = PagedAdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.preallocate = True
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": parameters()})
    assert len(optimizer.param_groups) == 1


def test_it_is_kept_in_copies_and_is_true_or_false() -> None:
    optimizer = PagedAdamW(parameters(), preallocate=True)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.preallocate
        train(copied.param_groups[0]["params"], copied)
    with pytest.raises(TypeError, match="preallocate is 1; it must be True or False"):
        PagedAdamW(parameters(), preallocate=1)


def test_nothing_is_captured_where_there_is_no_graph() -> None:
    optimizer = PagedAdamW(parameters())
    optimizer.check_capture()
    with pytest.raises(RuntimeError, match="no captured step of this PagedAdamW is alive"):
        optimizer.refresh()
