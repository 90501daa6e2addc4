"""What the tests of steps in one compiled call share: marks, fixtures, and rules whose numbers cannot be for long."""

from __future__ import annotations

from typing import Any

import pytest

import pagedopt
from pagedopt import PagedOptimizer
from pagedopt.optim.overlap import everyone
from pagedopt.system import look as build
from tests.specs import Case
from tests.world import QUICK, record

#: For tests of the compiled look alone.
compiled_alone = pytest.mark.skipif(not QUICK, reason="no compiled look here")


@pytest.fixture(params=["compiled", "python"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The look of optimizers that the test makes."""
    if request.param == "python":
        monkeypatch.setenv(build.VARIABLE, "python")
    elif not QUICK:
        pytest.skip("no compiled look here")
    found: str = request.param
    return found


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
