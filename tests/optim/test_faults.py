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
from often import long_but
from shots import EVERY, each, failure_at, hit, judge_failure, judge_signal, judge_two, signal_at, two_at

from tests.optim.faults import Scene, Stage, scenes

pytestmark = [pytest.mark.timeout(7200), pytest.mark.long] if EVERY else []
#: What state that is all away adds to state that is half away.
AWAY = ("first step", "step", "load used", "budget up", "budget down")
#: State that is in RAM or partly in a file, and state that is on a GPU or partly on the host.
ON_CPU = long_but(scenes(), lambda scene: scene.placement != "spilled" or scene.operation in AWAY)
ON_GPU = [pytest.param(scene, id=f"{scene}-cuda", marks=NEEDED) for scene in scenes("cuda")]
AGAIN = [each for each in ON_CPU if {"step", "load"} & {*each.values[0].operation.split()}]
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
    each(scene, signal_at, judge_signal, Stage)


@pytest.mark.parametrize("scene", [*ON_CPU, *ON_GPU], ids=str)
def test_a_failure_of_any_call(scene: Scene) -> None:
    each(scene, failure_at, judge_failure, Stage)


@pytest.mark.parametrize("scene", AGAIN, ids=str)
def test_a_second_interrupt(scene: Scene) -> None:
    """It may tear the step or the load, and then this is said."""
    each(scene, two_at, judge_two, Stage)


@pytest.mark.parametrize("case", ["adamw", "clipped"])
def test_an_interrupt_at_each_line_of_a_quick_step(case: str) -> None:
    scene = Scene("quick step", "resident", case)
    Stage.expected(scene)
    lines = lambda seen: range(1, seen.events + 1)  # noqa: E731
    hit(lambda: Stage(scene), lambda stage: stage.act, signal_at, lines, judge_signal)
