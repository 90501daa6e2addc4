"""An optimizer whose repeated steps are one compiled call, and its twin, whose looks are Python's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from edits import give, groups_of, parameters
from edits_check import World
from optim_support import ADAMW
from torch.nn import Parameter

import pagedopt
from pagedopt import PagedAdamW, PagedOptimizer
from pagedopt.optim.overlap import everyone
from pagedopt.optim.quick import QuickSteps


@pytest.fixture(autouse=True)
def nothing_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that break queued steps may have left one, and then all steps go the long way."""
    monkeypatch.setattr(everyone, "with_queued", set())


class Never(QuickSteps):
    """No step is one call."""

    def after(self, *_: Any) -> None:
        pass


def python_s(optimizer: Any) -> Any:
    """The optimizer, whose looks are Python's from now on."""
    optimizer._quick = Never()
    return optimizer


def is_quick(optimizer: Any) -> bool:
    return optimizer._quick.step is not None


def seen(world: World) -> list[Any]:
    """All that a step changes: bits of parameters and state, step counts, and versions."""
    found: list[Any] = [(p.detach().clone(), p._version) for p in world.params]
    found += [(key, t.detach().clone(), t._version) for key, t in world.tensors().items() if not t.is_meta]
    return found


def same(ours: World, other: World) -> None:
    for a, b in zip(seen(ours), seen(other), strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype and torch.equal(bits(x), bits(y)) if isinstance(x, torch.Tensor) else x == y


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def pair(case: Any, device: str, **options: Any) -> tuple[World, World]:
    """Ours with both looks, after four steps."""
    made = []
    for python in (False, True):
        params = parameters(device)
        optimizer = case.make(False, groups_of(params), **options)
        made.append(World(python_s(optimizer) if python else optimizer, params))
        assert made[-1].attempt(4, 0) is None
    return made[0], made[1]


def go_on(ours: World, other: World, first: int, count: int = 3) -> bool:
    """Steps on both sides, one by one; returns whether they went well, and fails if they differ."""
    for step in range(first, first + count):
        mine, theirs = ours.attempt(1, step), other.attempt(1, step)
        assert (type(mine), str(mine)) == (type(theirs), str(theirs))
        same(ours, other)
        if mine is not None:
            return False
    return True


def go_on_edited(ours: World, other: World, edits: Sequence[Callable[..., Any]], chance: random.Random) -> None:
    """Steps on both sides, eight times, behind an edit that chance takes; one that fails leaves no state."""
    for number in range(8):
        edit = chance.choice(edits)
        state = random.getstate()
        for world in (ours, other):
            random.setstate(state)
            try:
                edit(world.optimizer, world.params)
            except Exception:
                world.optimizer.state.clear()
        if not go_on(ours, other, 4 + 4 * number, count=chance.randrange(1, 5)):
            return


def train(optimizer: Any, params: list[Parameter], act: Callable[[Any, int], None], steps: int = 9) -> int:
    """Steps with new gradients, before each of which ``act`` edits groups; how many were one call."""
    found = 0
    for step in range(steps):
        give(params, step)
        act(optimizer, step)
        before = optimizer._quick.step
        optimizer.step()
        found += before is not None and optimizer._quick.step is before
    return found


@pytest.fixture
def simple() -> tuple[Any, list[Parameter]]:
    params = parameters()
    optimizer = PagedAdamW(params, **ADAMW)
    for step in range(4):
        give(params, step)
        optimizer.step()
    assert is_quick(optimizer)
    return optimizer, params


def steps_seen(optimizer: Any, act: Callable[[], object]) -> float:
    before = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item()
    act()
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() - before


def with_hook(optimizer: Any) -> None:
    handle = optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()
    handle.remove()


@pagedopt.rule
def warm(param: Any, grad: Any, *, lr: Any, total: Any, step: Any) -> Any:
    param = param - lr / (total - step) * grad
    return param


@pagedopt.rule
def rooted(param: Any, grad: Any, *, lr: Any, total: Any, step: Any) -> Any:
    param = param - lr * (total - step) ** 0.5 * grad
    return param


class Warm(PagedOptimizer):
    rule = warm

    def __init__(self, params: Any, lr: float = 0.1, total: float = 8.0, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "total": total}, **options)


class Rooted(Warm):
    rule = rooted
