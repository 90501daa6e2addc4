"""What the tests of steps in one compiled call share."""

from __future__ import annotations

from typing import Any

import pytest

import pagedopt
from pagedopt import PagedOptimizer
from pagedopt.optim.overlap import everyone
from tests.specs import Case
from tests.world import record


@pytest.fixture(autouse=True)
def nothing_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that break queued steps may have left one, and then all steps go the long way."""
    monkeypatch.setattr(everyone, "with_queued", set())


def compiled(optimizer: Any, look: str) -> bool:
    """Whether the optimizer's steps are quick if, and only if, the look is compiled."""
    return (record(optimizer) is not None) == (look == "compiled")


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


WARM = Case(name="warm", ours=Warm, theirs=None, rule="sgd", options={}, other={})
ROOTED = Case(name="rooted", ours=Rooted, theirs=None, rule="sgd", options={}, other={})
