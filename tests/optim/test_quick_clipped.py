"""Clipped and scaled steps in one compiled call: to the bit what the long way does, norms included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from calls import calls
from clipped import params_of
from edits import give, groups_of, parameters
from edits_check import World, edits_for
from gpu_support import DEVICES
from looks import compiled_alone
from often import MARKS, long_but
from optim_support import ADAMW
from quick_twins import go_on, go_on_edited, is_quick, nothing_is_queued, pair, python_s, same, train
from torch.nn import Parameter

from pagedopt import PagedAdamW, PagedLion, PagedSGD
from tests.specs import BY_STATE as CASES

__all__ = ["nothing_is_queued"]  # fixtures
pytestmark = compiled_alone

EDITS = [
    pytest.param(name, edit, id=f"{name}: {edit}", marks=MARKS[name == "adamw"])
    for name in CASES
    for edit in edits_for(CASES[name])
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "edit"), EDITS)
def test_an_edit_is_noticed_again_and_again(name: str, edit: str, device: str) -> None:
    ours, other = pair(CASES[name], device, max_grad_norm=0.5)
    assert is_quick(ours.optimizer)
    for number in range(2):
        for world in (ours, other):
            try:
                edits_for(CASES[name])[edit](world.optimizer, world.params)
            except Exception:  # nothing is left to edit
                return
        if not go_on(ours, other, 4 + 6 * number, count=6):
            return
        assert_same_norm(ours.optimizer, other.optimizer)


def assert_same_norm(ours: Any, other: Any) -> None:
    mine, theirs = ours.grad_norm, other.grad_norm
    assert mine.cpu().numpy().tobytes() == theirs.cpu().numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", long_but(range(200), range(8).__contains__))
def test_edits_at_random(seed: int, device: str) -> None:
    chance = random.Random(seed)
    case = CASES[list(CASES)[seed % len(CASES)]]
    found = [edit for name, edit in edits_for(case).items() if name[:3] != "no "]
    found += [lambda optimizer, _: setattr(optimizer, "max_grad_norm", None if optimizer.max_grad_norm else 0.5)]
    found += [lambda optimizer, _: setattr(optimizer, "max_grad_norm", (optimizer.max_grad_norm or 1.0) * 2)]
    ours, other = pair(case, device, max_grad_norm=0.5)
    go_on_edited(ours, other, found, chance)


def set_norm(optimizer: Any, step: int) -> None:
    optimizer.max_grad_norm = 0.25 * (step + 1)


@pytest.mark.parametrize("act", [lambda *_: None, set_norm], ids=["one norm", "another in each step"])
@pytest.mark.parametrize("norm", [0.25, 1e9, float("inf")])
@pytest.mark.parametrize("make", [PagedAdamW, PagedLion, lambda p, **k: PagedSGD(p, momentum=0.9, **k)])
@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_several_dtypes_and_lists_of_many_chunks(
    make: Any, form: str | None, norm: float, act: Any, device: str
) -> None:
    both = []
    for python in (False, True):
        lists = params_of(), params_of((5, 900), torch.bfloat16), params_of((70_000,), torch.float64)
        params = [Parameter(p.detach().to(device)) for each in lists for p in each]
        optimizer = make(params, lr=0.01, state_format=form, max_grad_norm=norm)
        if python:
            python_s(optimizer)
        taken = train(optimizer, params, act)
        assert python or taken >= 4
        both.append(World(optimizer, params))
    same(*both)
    assert_same_norm(both[0].optimizer, both[1].optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite(value: float, device: str) -> None:
    def act(optimizer: Any, step: int) -> None:
        if step == 6:
            optimizer.param_groups[0]["params"][1].grad.view(-1)[0] = value

    both = []
    for python in (False, True):
        params = parameters(device)
        optimizer = PagedSGD(params, max_grad_norm=1.0, lr=0.1)
        taken = train(python_s(optimizer) if python else optimizer, params, act)
        assert python or taken >= 4
        both.append(World(optimizer, params))
    same(*both)
    assert_same_norm(both[0].optimizer, both[1].optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("absent", [[1], [0, 4]])
def test_a_gradient_that_stays_away_and_comes_back(absent: list[int], device: str) -> None:
    both = []
    for python in (False, True):
        params = parameters(device)
        optimizer = PagedAdamW(groups_of(params), **ADAMW, max_grad_norm=0.5)
        if python:
            python_s(optimizer)
        taken = 0
        for step in range(24):
            give(params, step, skip=absent if step // 8 % 2 else ())
            before = optimizer._quick.step
            optimizer.step()
            taken += before is not None and before is optimizer._quick.step
        assert python or taken >= 8
        both.append(World(optimizer, params))
    same(*both)
    assert_same_norm(both[0].optimizer, both[1].optimizer)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("infinite", [(), (6, 7)], ids=["finite", "infinite"])
def test_scaled_steps(clip: float | None, infinite: tuple[int, ...]) -> None:
    both = []
    for python in (False, True):
        params = parameters()
        optimizer = PagedAdamW(params, **ADAMW, fused=True, max_grad_norm=clip)
        if python:
            python_s(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        scaler.scale(torch.ones(()))
        taken = 0
        for step in range(12):
            give(params, step)
            if step in infinite:
                params[2].grad.view(-1)[0] = float("inf")
            before = optimizer._quick.step
            scaler.step(optimizer)
            scaler.update()
            taken += before is not None and before is optimizer._quick.step and step not in infinite
        assert python or taken >= 8 - len(infinite)
        both.append(World(optimizer, params))
        assert optimizer.state[params[0]]["step"] == 12 - len(infinite)
    same(*both)
    if clip:
        assert_same_norm(both[0].optimizer, both[1].optimizer)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_few_calls(device: str) -> None:
    params = parameters(device)
    optimizer = PagedAdamW(params, **ADAMW, max_grad_norm=0.5)
    train(optimizer, params, lambda *_: None)
    assert is_quick(optimizer)
    give(params, 20)
    assert len(calls(optimizer.step)) <= {"cpu": 30, "cuda": 60}[device]


@pytest.mark.parametrize(("make", "norm"), [(PagedAdamW, 0.5), (PagedLion, None)])  # whose numbers stay the same
@pytest.mark.parametrize("device", DEVICES)
def test_many_steps_in_flight(device: str, make: Any, norm: float | None) -> None:
    """More steps than there are buffers for tables, each with gradients elsewhere, and none is waited for."""
    both = []
    for python in (False, True):
        params = [Parameter(torch.ones(2, 3, device=device)) for _ in range(200)]
        optimizer, taken = make(params, max_grad_norm=norm), 0
        if python:
            python_s(optimizer)
        alive = []
        for step in range(60):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, 0.25 + (step * i) % 7)
            alive.append([p.grad for p in params])
            before = optimizer._quick.step
            optimizer.step()
            taken += before is not None and optimizer._quick.step is before
        assert python or taken >= 50
        both.append(World(optimizer, params))
    same(*both)
    if norm is not None:
        assert_same_norm(both[0].optimizer, both[1].optimizer)


def test_within_a_backward_it_is_refused() -> None:
    params = parameters()
    optimizer = PagedAdamW(params, max_grad_norm=0.5)
    train(optimizer, params, lambda *_: None)
    assert is_quick(optimizer)
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"max_grad_norm is 0\.5, and step"):
        leaf.sum().backward()
    assert optimizer.state[params[0]]["step"] == 9


def test_squares_of_a_gradient_follow_it_behind_an_interrupt() -> None:
    """Its address may be new in the table of the update alone."""
    params = [Parameter(torch.ones(40)), Parameter(torch.ones(3))]
    optimizer = PagedSGD(params, lr=1.0, max_grad_norm=1.0)
    train(optimizer, params, lambda *_: None)
    assert is_quick(optimizer)
    (squares,) = optimizer._launches.factor.alone.squares.lists
    squares.table.row_words[0, 0] = squares.table.row_words[1, 0]
    for p in params:
        p.grad.fill_(2.0)
    before = optimizer._quick.step
    optimizer.step()
    assert optimizer._quick.step is before
    assert optimizer.grad_norm == pytest.approx(2 * 43**0.5)


def test_without_memory_for_a_thread_s_squares_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = PagedAdamW(params, max_grad_norm=1.0)
    train(optimizer, params, lambda *_: None)
    call = optimizer._quick.step._clip.launches[0].call
    kept = [p.detach().clone() for p in params]
    call.words[4] = 1  # as a kernel leaves it
    monkeypatch.setattr(type(optimizer), "_step", lambda self: None)
    before = optimizer._quick.step
    optimizer.step()
    assert optimizer._quick.step is before
    assert (call.words[4], optimizer.damaged) == (0, "")
    assert all(torch.equal(p, was) for p, was in zip(params, kept, strict=True))
