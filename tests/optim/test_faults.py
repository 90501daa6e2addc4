"""An interrupt at any line, or a failure of any call, leaves what was, what should be, or an optimizer that says so.

``PAGEDOPT_EVERY_LINE=1`` tries every line and every call (``10``: every tenth); otherwise a few of each operation.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_support import open_files
from gpu_support import NEEDED, assert_clean
from shots import EVERY, each, failure_at, judge_failure, judge_signal, judge_two, signal_at, two_at

from tests.optim.faults import Scene, scenes
from tests.optim.faults_crowd import CROWDS, Crowd

pytestmark = [pytest.mark.timeout(7200), pytest.mark.long] if EVERY else []
#: State that is in RAM or partly in a file, and state that is on a GPU or partly on the host.
ON_CPU, ON_GPU = scenes(), [pytest.param(scene, id=f"{scene}-cuda", marks=NEEDED) for scene in scenes("cuda")]
AGAIN = [s for s in ON_CPU if "step" in s.operation or "load" in s.operation]
AGAIN += [each for each in ON_GPU if each.values[0].operation in ("step", "load used")]


@pytest.fixture(autouse=True)
def nothing_is_left(folder: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    gc.collect()
    assert open_files(folder) == 0, "a state file has been left open"
    if request.node.get_closest_marker("gpu"):
        assert_clean()


@pytest.mark.parametrize("scene", [*ON_CPU, *ON_GPU], ids=str)
def test_a_signal_at_any_line(scene: Scene) -> None:
    each(scene, signal_at, judge_signal)


@pytest.mark.parametrize("scene", [*ON_CPU, *ON_GPU], ids=str)
def test_a_failure_of_any_call(scene: Scene) -> None:
    each(scene, failure_at, judge_failure)


@pytest.mark.parametrize("scene", AGAIN, ids=str)
def test_a_second_interrupt(scene: Scene) -> None:
    """It may tear the step or the load, and then this is said."""
    each(scene, two_at, judge_two)


@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_a_signal_among_many_optimizers(scene: Scene) -> None:
    """Who had his turn is complete, who had not is unchanged."""
    each(scene, signal_at, judge_signal, Crowd)


@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_a_failure_among_many_optimizers(scene: Scene) -> None:
    """One at most is damaged, and says so; loading mends it, and the others need nothing."""
    each(scene, failure_at, judge_failure, Crowd)
