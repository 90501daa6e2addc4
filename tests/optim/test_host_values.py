"""Hyperparameters and step counts that nobody should use, and a default device: followed or refused as torch does."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from edits import groups_of, parameters, steps
from edits_check import PLACEMENTS, World, assert_same, options, worlds

from pagedopt import PagedAdamW, PagedLion
from tests.optim.specs import BY_STATE as CASES

VALUES = [math.nan, math.inf, 2.5, -1, 2**32, 0, 1]
HYPERPARAMETERS = [(name, number) for name, case in CASES.items() for number in case.numbers]
FORMS: dict[str, Callable[[Any], Any]] = {"tensor": lambda v: torch.tensor(float(v)), "number": lambda v: v}


def changed(case: str, name: str, value: float) -> dict[str, Any]:
    """``name`` as a group holds it."""
    if name in ("beta1", "beta2"):
        beta1, beta2 = CASES[case].options["betas"]
        return {"betas": (value, beta2) if name == "beta1" else (beta1, value)}
    return {name: value}


def same(some: list[torch.nn.Parameter], others: list[torch.nn.Parameter]) -> bool:
    return all(map(torch.equal, some, others))


def outcome(act: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a call returns, or raises."""
    try:
        return act(*given, **named)
    except Exception as error:
        return error


def together(act: Callable[[World], Any], ours: World, theirs: World) -> bool:
    """The same on both sides; returns whether torch went on, and sees that ours did the same."""
    found = [outcome(act, world) for world in (theirs, ours)]
    other, mine = (error if isinstance(error, BaseException) else None for error in found)
    assert type(mine) is type(other), f"torch: {other!r}, ours: {mine!r}"
    return other is None


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("case", "name"), HYPERPARAMETERS)
def test_at_construction(case: str, name: str, value: float) -> None:
    chosen = CASES[case]
    given = changed(case, name, value)
    made: list[World | type] = []
    for make in (chosen.theirs, chosen.ours):
        params = parameters()
        optimizer = outcome(make, groups_of(params), **{**chosen.options, **given})
        made.append(type(optimizer) if isinstance(optimizer, Exception) else World(optimizer, params))
    theirs_, ours = made
    if isinstance(theirs_, World) and isinstance(ours, World):
        if together(lambda w: w.attempt(3, 0), ours, theirs_):
            assert_same(ours, theirs_)
    else:
        assert ours is theirs_


PAIR = (0.75, 0.5)  # exact in float32, too
PAIRS: dict[str, tuple[Any, type]] = {
    "tuple": (PAIR, float),
    "list": ([*PAIR], float),
    "deque": (deque(PAIR), float),
    "numbers of NumPy": ((np.float32(0.75), np.float64(0.5)), float),
    "float64 array": (np.array(PAIR), float),
    "float32 array": (np.array(PAIR, np.float32), float),
    "tensors": ((torch.tensor(0.75), torch.tensor(0.5)), torch.Tensor),
    "tensor": (torch.tensor(PAIR), torch.Tensor),
}


@pytest.mark.parametrize(("pair", "items"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("kind", [PagedAdamW, PagedLion])
def test_betas_are_any_two_numbers(kind: Any, pair: Any, items: type) -> None:
    """The defaults have a tuple, as torch's; a group keeps what it was given, and follows an edit of it in place."""
    pair = copy.deepcopy(pair)
    usual, by_default, by_group = (parameters() for _ in range(3))
    both = [kind(usual, betas=PAIR), kind(by_default, betas=pair)]
    optimizers = [*both, kind([{"params": by_group, "betas": pair}])]
    betas = both[1].param_groups[0]["betas"]
    assert betas == both[0].param_groups[0]["betas"] == PAIR
    assert [type(betas), *map(type, betas)] == [tuple, items, items]
    assert optimizers[2].param_groups[0]["betas"] is pair
    for step in range(5):
        if step == 3 and hasattr(pair, "__setitem__"):
            pair[0] = 0.25
            for optimizer in both:
                optimizer.param_groups[0]["betas"] = (0.25, 0.5)
        for optimizer, params in zip(optimizers, (usual, by_default, by_group), strict=True):
            steps(optimizer, params, 1, step)
    assert same(by_default, usual)
    assert same(by_group, usual)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("case", "name"), HYPERPARAMETERS)
def test_in_a_group_between_steps(case: str, name: str, value: float) -> None:
    """Back to a good value after it, the step goes on as torch's does."""
    placement = PLACEMENTS[len(name) % 2]
    ours, theirs = worlds(CASES[case], placement, steps=2)
    for world in (ours, theirs):
        world.optimizer.param_groups[0].update(changed(case, name, value))
    if not together(lambda w: w.attempt(1, 2), ours, theirs):
        return
    assert_same(ours, theirs)
    for world in (ours, theirs):
        world.optimizer.param_groups[0].update(changed(case, name, 0.5))
    assert together(lambda w: w.attempt(1, 3), ours, theirs)
    assert_same(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5, 2**32, -1, 0, 2**24, 7])
def test_a_loaded_step(value: float, used: bool, form: str) -> None:
    case = CASES["adamw"]
    _, source = worlds(case, "resident", steps=3)
    state = copy.deepcopy(source.optimizer.state_dict())
    state["state"][1]["step"] = FORMS[form](value)
    ours, theirs = worlds(case, PLACEMENTS[used], steps=2 if used else 0)

    def load_and_step(world: World) -> BaseException | None:
        world.optimizer.load_state_dict(copy.deepcopy(state))
        return world.attempt(2, 3)

    if together(load_and_step, ours, theirs):
        assert_same(ours, theirs)


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5, 2**32, -1, 0, 2**24])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_filled_in_place(value: float, placement: str) -> None:
    ours, theirs = worlds(CASES["adamw"], placement, steps=2)
    for world in (ours, theirs):
        world.optimizer.state[world.params[1]]["step"].fill_(value)
    if together(lambda w: w.attempt(2, 2), ours, theirs):
        assert_same(ours, theirs)


def test_groups_that_differ_by_two_to_the_32_steps() -> None:
    """Group and count must not be mixed into one number."""
    ours, theirs = worlds(CASES["adamw"], "resident", steps=1)
    for world in (ours, theirs):
        for p in world.params[:4]:
            world.optimizer.state[p]["step"].fill_(2.0**32)
        for p in world.params[4:]:
            world.optimizer.state[p]["step"].fill_(0)
    assert ours.attempt(2, 1) is None is theirs.attempt(2, 1)
    assert_same(ours, theirs)


@contextlib.contextmanager
def by_setting() -> Iterator[None]:
    torch.set_default_device("meta")  # stands for any that is not the parameters'
    try:
        yield
    finally:
        torch.set_default_device(None)


def on_cpu(world: World, count: int, first: int) -> BaseException | None:
    """Steps with the CPU as the default: torch 2.11's own step counts follow the default, and cannot be read there."""
    with torch.device("cpu"):
        return world.attempt(count, first)


@pytest.mark.parametrize("default", [by_setting, lambda: torch.device("meta")], ids=["set", "with"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_a_default_device_is_not_the_parameters(name: str, placement: str, default: Callable[[], Any]) -> None:
    """Construction, steps, a late parameter, another budget, a checkpoint and a copy."""
    case = CASES[name]
    ours, theirs = worlds(case, placement)
    late = parameters()[1], parameters()[1]
    with default():
        ours.optimizer = case.make(False, groups_of(ours.params), **options(case, placement, ours.params))
        assert ours.attempt(2, 0) is None is on_cpu(theirs, 2, 0)
        for world, p in zip((ours, theirs), late, strict=True):
            world.optimizer.add_param_group({"params": [p]})
            world.params.append(p)
        assert ours.attempt(1, 2) is None is on_cpu(theirs, 1, 2)
        if placement != "resident":
            ours.optimizer.set_device_budget(100_000)
        saved = ours.optimizer.state_dict()
        ours.optimizer.load_state_dict(copy.deepcopy(saved))
        ours = World(*copy.deepcopy((ours.optimizer, ours.params)))
        ours.optimizer.load_state_dict(saved)
        assert ours.attempt(1, 3) is None is on_cpu(theirs, 1, 3)
    assert_same(ours, theirs)
    assert all(t.device.type == "cpu" for t in ours.tensors().values())
