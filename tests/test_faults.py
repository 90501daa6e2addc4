"""An interrupt at any line, or a failure of any call, leaves what was, what should be, or an optimizer that says so.

``PAGEDOPT_EVERY_LINE=1`` tries every line and every call; otherwise a few of each operation.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Scene, Stage, expected, scenes, verdict
from file_support import folder_for_state, open_files
from injector import Alarm, Outcome, fail_at, interrupt_at

EVERY = bool(os.environ.get("PAGEDOPT_EVERY_LINE"))
#: How many places of each operation are hit, by placement: files take longer.
SHOTS = {"resident": 9, "spilled": 2, "half": 3}
ERRORS: tuple[Callable[[], BaseException], ...] = (
    MemoryError,
    lambda: OSError(errno.ENOSPC, "no space, says the test"),
    lambda: OSError(errno.EIO, "broken, says the test"),
)
NEVER = 1 << 40
Shoot = Callable[[int, Callable[[], Any]], Outcome]


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with folder_for_state() as path:
        yield path


def places(scene: Scene, events: int, share: float) -> range:
    """Which of ``events`` to hit: evenly spread, and others in each scene."""
    stride = 1 if EVERY else max(1, int(events / max(1.0, SHOTS[scene.placement] * share)))
    return range(1 + zlib.crc32(str(scene).encode()) % stride, events + 1, stride)


def each(scene: Scene, shoot: Shoot, judge: Callable[[Stage, Outcome], object], share: float = 1) -> None:
    """Shoot at each place, at a stage of its own, and judge what came of it."""
    expected(scene)
    for place in places(scene, shoot(NEVER, Stage(scene).act).events, share):
        stage = Stage(scene)
        outcome = shoot(place, stage.act)
        print(scene, place, outcome.shots, repr(outcome.error))
        judge(stage, outcome)


def assert_rose(outcome: Outcome) -> None:
    """What a handler raises, rises; unless it was raised where Python lets nothing rise."""
    kinds = (KeyboardInterrupt, Alarm)
    dropped = any(isinstance(error, kinds) for error in outcome.unraisable)
    assert isinstance(outcome.error, kinds) or dropped or not outcome.shots, repr(outcome.error)


def assert_closed(folder: Path) -> None:
    gc.collect()
    assert open_files(folder) == 0, "a state file has been left open"


@pytest.mark.parametrize("scene", scenes(), ids=str)
def test_a_signal_at_any_line(scene: Scene, folder: Path) -> None:
    """Ctrl-C, and between them SIGALRM with a handler that raises."""

    def judge(stage: Stage, outcome: Outcome) -> None:
        assert_rose(outcome)
        assert verdict(stage, may_be_damaged=False) == "after" or outcome.error is not None

    numbers = (signal.SIGINT, signal.SIGALRM)
    each(scene, lambda at, act: interrupt_at(at, numbers[at % 2], act), judge)
    assert_closed(folder)


@pytest.mark.parametrize("scene", scenes(), ids=str)
def test_a_failure_of_any_call(scene: Scene, folder: Path) -> None:
    def judge(stage: Stage, outcome: Outcome) -> None:
        assert outcome.error is None or isinstance(outcome.error, Exception)
        assert verdict(stage, may_be_damaged=True) == "after" or outcome.error is not None, "nobody heard of it"

    each(scene, lambda at, act: fail_at(at, ERRORS[at % 3](), act), judge)
    assert_closed(folder)


@pytest.mark.parametrize("gap", [1, 40])
@pytest.mark.parametrize("scene", [s for s in scenes() if "step" in s.operation or "load" in s.operation], ids=str)
def test_a_second_interrupt(scene: Scene, gap: int) -> None:
    """It may tear the step or the load, and then this is said."""

    def judge(stage: Stage, outcome: Outcome) -> None:
        assert_rose(outcome)
        verdict(stage, may_be_damaged=len(outcome.shots) > 1)

    each(scene, lambda at, act: interrupt_at((at, at + gap), signal.SIGINT, act), judge, 0.5)
