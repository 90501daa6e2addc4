"""An interrupt at a line, or a failure of a call, while a step is queued or carried out: then training goes on.

``PAGEDOPT_EVERY_LINE`` as in ``test_faults.py``.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from file_support import open_files
from injector import Outcome
from often import MARKS
from overlapped import Loop
from shots import EVERY, NEVER, assert_rose, failure_at, signal_at

pytestmark = [
    pytest.mark.timeout(7200 if EVERY else 110),
    *MARKS[not EVERY],
    pytest.mark.filterwarnings("ignore:this step was not queued.*no forward"),
]
Shoot = Callable[[int, Callable[[], Any]], Outcome]


@pytest.fixture(autouse=True)
def nothing_is_left(folder: Path) -> Iterator[None]:
    yield
    gc.collect()
    assert open_files(folder) == 0


def ready(attached: bool = True) -> Loop:
    """A model whose update is queued."""
    loop = Loop()
    loop.start(attached)
    loop.train(3)
    return loop


@functools.cache
def plain() -> list[list[torch.Tensor]]:
    """Weights and state after 3, 4, … plain steps."""
    loop = ready(attached=False)
    return [loop.values(), *((loop.train(1), loop.values())[1] for _ in range(3))]


def taken(loop: Loop) -> int:
    """How many steps the weights and state are of."""
    values = loop.values()
    return next(3 + i for i, each in enumerate(plain()) if all(map(torch.equal, values, each)))


def go_on(loop: Loop, outcome: Outcome, may_be_damaged: bool) -> None:
    """All of a step is there or nothing of it, or the optimizer says that it is damaged; two more steps are right."""
    try:
        loop.opts[0].wait()
    except Exception:
        assert may_be_damaged
    if loop.opts[0].damaged:
        assert may_be_damaged, loop.opts[0].damaged
        assert outcome.error is not None, "nobody heard of it"
        with pytest.raises(RuntimeError, match="is damaged"):
            loop.opts[0].step()
        return
    loop.number = taken(loop)
    loop.opts[0].zero_grad()
    loop.train(1)
    loop.train(1) if loop.number < 6 else None
    assert taken(loop) == loop.number


@pytest.mark.parametrize(
    ("shoot", "may_be_damaged"), [(signal_at, False), (failure_at, True)], ids=["signal", "failure"]
)
@pytest.mark.parametrize("shots", [4, pytest.param(60, marks=pytest.mark.long)])
def test_an_iteration_is_hit(shoot: Shoot, may_be_damaged: bool, shots: int) -> None:
    events = shoot(NEVER, functools.partial(ready().train, 1)).events
    wrong = []
    for at in range(1, events + 1, EVERY or events // shots):
        loop = ready()
        outcome = shoot(at, functools.partial(loop.train, 1))
        try:
            if not may_be_damaged:
                assert_rose(outcome)
            go_on(loop, outcome, may_be_damaged)
        except Exception as error:
            wrong.append(f"{at}: {outcome.shots} raised {outcome.error!r}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
