"""An interrupt at any line, or a failure of any call, leaves what was, what should be, or an optimizer that says so.

``PAGEDOPT_EVERY_LINE=1`` tries every line and every call (``10``: every tenth); otherwise a few of each operation.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import faults_crowd
import pytest
from faults import Scene, scenes
from faults_crowd import CROWDS, Crowd
from file_support import folder_for_state, open_files
from shots import EVERY, each, failure_at, judge_failure, judge_signal, judge_two, signal_at, two_at

pytestmark = [pytest.mark.timeout(7200)] if EVERY else []


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with folder_for_state() as path:
        yield path


def assert_closed(folder: Path) -> None:
    gc.collect()
    assert open_files(folder) == 0, "a state file has been left open"


@pytest.mark.parametrize("scene", scenes(), ids=str)
def test_a_signal_at_any_line(scene: Scene, folder: Path) -> None:
    each(scene, signal_at, judge_signal)
    assert_closed(folder)


@pytest.mark.parametrize("scene", scenes(), ids=str)
def test_a_failure_of_any_call(scene: Scene, folder: Path) -> None:
    each(scene, failure_at, judge_failure)
    assert_closed(folder)


@pytest.mark.parametrize("scene", [s for s in scenes() if "step" in s.operation or "load" in s.operation], ids=str)
def test_a_second_interrupt(scene: Scene) -> None:
    """It may tear the step or the load, and then this is said."""
    each(scene, two_at, judge_two)


@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_a_signal_among_many_optimizers(scene: Scene, folder: Path) -> None:
    """Who had his turn is complete, who had not is unchanged."""
    each(scene, signal_at, faults_crowd.judge_signal, Crowd, faults_crowd.expected)
    assert_closed(folder)


@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_a_failure_among_many_optimizers(scene: Scene, folder: Path) -> None:
    """One at most is damaged, and says so; loading mends it, and the others need nothing."""
    each(scene, failure_at, faults_crowd.judge_failure, Crowd, faults_crowd.expected)
    assert_closed(folder)
