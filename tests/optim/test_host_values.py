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
from often import MARKS
from optim_support import same

from pagedopt import PagedAdamW, PagedLion
from tests.acts import add_group, counts
from tests.loads import budget, exchange, load
from tests.specs import BY_STATE as CASES
from tests.world import SIDES, TORCH, World, Worlds, parameters, steps

VALUES = [math.nan, math.inf, 2.5, -1, 2**32, 0, 1]
COUNTS = [*VALUES[:-1], 2**24]
#: No measure: a difference or mean that rounding takes across 0, where its root is NaN in torch, too.
ACROSS_ZERO = (
    ("rmsprop centered", "alpha", 0), ("rmsprop centered momentum", "alpha", 0), ("nadam", "beta2", 2.5),
    ("schedule free adamw", "beta2", 2.5),
)  # fmt: skip
#: AMSGrad has those of AdamW, and a maximum, which may be infinite or NaN.
ODD = [
    pytest.param(case, name, value, marks=MARKS[case != "amsgrad" or not math.isfinite(value)])
    for case in CASES
    for name in CASES[case].numbers
    for value in VALUES
    if (case, name, value) not in ACROSS_ZERO
]


def changed(case: str, name: str, value: float) -> dict[str, Any]:
    """``name`` as a group holds it."""
    if name.startswith("beta") and "betas" in CASES[case].options:
        betas = [*CASES[case].options["betas"]]
        betas[int(name[4:]) - 1] = value
        return {"betas": tuple(betas)}
    return {name: value}


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
    optimizers = kind(usual, betas=PAIR), kind(by_default, betas=pair), kind([{"params": by_group, "betas": pair}])
    of_all, of_group = (optimizer.param_groups[0]["betas"] for optimizer in optimizers[1:])
    assert of_all == PAIR
    assert [type(of_all), *map(type, of_all)] == [tuple, items, items]
    assert of_group is pair
    for step in range(4):
        if step == 2 and hasattr(pair, "__setitem__"):
            pair[0] = 0.25
            for optimizer in optimizers[:2]:
                optimizer.param_groups[0]["betas"] = (0.25, 0.5)
        for optimizer, params in zip(optimizers, (usual, by_default, by_group), strict=True):
            steps(optimizer, params, 1, step)
    assert same(by_default, usual)
    assert same(by_group, usual)


@pytest.mark.parametrize(("case", "name", "value"), ODD)
def test_in_a_group_between_steps(case: str, name: str, value: float) -> None:
    """Back to a good value after it, the step goes on as torch's does."""
    worlds = Worlds(CASES[case], *SIDES[:3]).step(3)
    for number in (value, 0.5):
        worlds.do(lambda w, number=number: w.groups[0].update(changed(case, name, number))).step(1)


@pytest.mark.parametrize("form", [lambda v: torch.tensor(float(v)), lambda v: v], ids=["tensor", "number"])
@pytest.mark.parametrize("used", [0, 3], ids=["fresh", "used"])
@pytest.mark.parametrize("value", COUNTS)
def test_a_loaded_step(value: float, used: int, form: Callable[[Any], Any]) -> None:
    source = World(CASES["adamw"], TORCH)
    assert [source.step() for _ in range(3)] == [None] * 3
    state = copy.deepcopy(source.optimizer.state_dict())
    state["state"][1]["step"] = form(value)
    Worlds(CASES["adamw"], *SIDES[:3]).step(used).do(load(lambda _: copy.deepcopy(state))).step(2)


@pytest.mark.parametrize("value", COUNTS)
def test_a_step_filled_in_place(value: float) -> None:
    Worlds(CASES["adamw"], *SIDES).step(3).do(counts(lambda t: t.fill_(value))).step(2)


def test_groups_that_differ_by_two_to_the_32_steps() -> None:
    """Group and count must not be mixed into one number."""

    def act(world: World) -> None:
        for i, p in enumerate(world.params):
            world.state[p]["step"].fill_(2.0**32 if i < 4 else 0)

    assert not Worlds(CASES["adamw"], *SIDES).step(1).do(act).step(2).over


@contextlib.contextmanager
def by_setting() -> Iterator[None]:
    torch.set_default_device("meta")  # stands for any that is not the parameters'
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("default", [by_setting, lambda: torch.device("meta")], ids=["set", "with"])
@pytest.mark.parametrize("name", CASES)
def test_a_default_device_is_not_the_parameters(name: str, default: Callable[[], Any]) -> None:
    """Construction, steps, a late parameter, another budget, a checkpoint and a copy."""
    with default():
        worlds = Worlds(CASES[name], *SIDES).step(2).do(add_group).step(1).do(budget(100_000))
        worlds.do(load(copy.deepcopy)).do(exchange(copy.deepcopy)).do(load(lambda saved: saved)).step(1)
    assert not worlds.over
    assert all(t.device.type == "cpu" for world in worlds.ours for t in world.tensors().values())
