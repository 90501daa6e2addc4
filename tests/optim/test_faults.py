"""An interrupt at any line, or a failure of any call, leaves what was, what should be, or an optimizer that says so.

``PAGEDOPT_EVERY_LINE=1`` tries every line and every call (``10``: every tenth); otherwise a few of each operation.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_errors import assert_clean
from file_support import open_files
from gpu_support import NEEDED
from often import long_but
from shots import EVERY, each, failure_at, judge_failure, judge_signal, judge_two, signal_at, two_at
from stand_ins import refusal

from tests.optim.faults import Scene, Stage, Values, Way, is_same, scenes
from tests.specs import BY_STATE
from tests.world import give, parameter, steps

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


# --- an optimizer for each parameter, as training loops that step in hooks make them ----------------------------------


#: More optimizers than state files that are not shared; every fourth parameter spans pages.
COUNT, SMALL, LARGE = 20, 300, 20_000


class Crowd:
    """Optimizers of one parameter each, ready for an operation on one after the other; all state is away."""

    def __init__(self, scene: Scene, theirs: bool = False) -> None:
        self.scene, self.case = scene, BY_STATE[scene.case]
        self.params = [parameter((SMALL if i % 4 else LARGE,), i) for i in range(COUNT)]
        options = {} if theirs else {"placement": "file", "device_budget": 0}
        self.optimizers: list[Any] = [self.case.make(theirs, [{"params": [p]}], **options) for p in self.params]
        self.act = ACTS[scene.operation](self)

    def train(self, count: int, first: int) -> None:
        for i in range(COUNT):
            self.train_one(i, count, first)

    def train_one(self, i: int, count: int, first: int) -> None:
        steps(self.optimizers[i], [self.params[i]], count, first)

    def values(self, i: int) -> Values:
        entry = self.optimizers[i].state.get(self.params[i], {})
        return {(i, name): value.detach().clone() for name, value in [("param", self.params[i]), *entry.items()]}

    @staticmethod
    def expected(scene: Scene) -> object:
        return expected(scene)

    def verdict(self, may_be_damaged: bool) -> str:
        """ "after" if all are, else that of the last: "damaged", or "before"; in this order along the crowd, of which
        one at most is damaged and nobody suffers for another."""
        found = [verdict(self, i) for i in range(COUNT)]
        assert found == sorted(found, key=("after", "damaged", "before").index), f"out of order: {found}"
        assert found.count("damaged") <= may_be_damaged, found
        return found[-1]


def step(crowd: Crowd, before: int = 0) -> Callable[[], Any]:
    crowd.train(before, 0)
    for p in crowd.params:
        give([p], before)
    return lambda: [optimizer.step() for optimizer in crowd.optimizers]


def load(crowd: Crowd) -> Callable[[], Any]:
    crowd.train(2, 0)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in crowd.optimizers]
    crowd.train(1, 2)

    def act() -> None:
        for optimizer, one in zip(crowd.optimizers, saved, strict=True):
            optimizer.load_state_dict(one)

    return act


ACTS: dict[str, Callable[[Crowd], Callable[[], Any]]] = {
    "first steps": step,
    "steps": functools.partial(step, before=2),
    "loads": load,
}
CROWDS = [
    Scene(operation, "spilled", case)
    for operation, case in (("first steps", "adamw"), ("steps", "adamw"), ("steps", "momentum"), ("loads", "adamw"))
]


@functools.cache
def expected(scene: Scene) -> list[tuple[Way, Way]]:
    """Of each optimizer, without the operation and with it; torch's optimizers have the same."""
    ways: list[list[Way]] = []
    for done in (False, True):
        ours, theirs = Crowd(scene), Crowd(scene, theirs=True)
        for crowd in (ours, theirs) if done else ():
            crowd.act()
        now = [(ours.values(i), copy.deepcopy(ours.optimizers[i].state_dict())) for i in range(COUNT)]
        for crowd in (ours, theirs):
            crowd.train(2, 10)
        ways.append([Way(values, ours.values(i), saved) for i, (values, saved) in enumerate(now)])
        for i in range(COUNT):
            torch.testing.assert_close(ours.values(i), theirs.values(i), rtol=2e-5, atol=2e-6)
    return list(zip(*ways, strict=True))


def verdict(crowd: Crowd, i: int) -> str:
    before, after = expected(crowd.scene)[i]
    optimizer, word = crowd.optimizers[i], ""
    if "damaged" in refusal(optimizer.state_dict):
        word, way = "damaged", after
        with torch.no_grad():
            crowd.params[i].copy_(after.values[i, "param"])
        optimizer.load_state_dict(copy.deepcopy(after.saved))
    now, has_step = crowd.values(i), crowd.case.has_step
    ways = [way for way in (after, before) if is_same(now, way.values, has_step)]
    assert ways, f"optimizer {i} is neither unchanged nor complete"
    way = ways[0]
    crowd.train_one(i, 2, 10)
    assert is_same(crowd.values(i), way.later, True), f"the next steps of optimizer {i} are wrong"
    return word or ("after" if way is after else "before")


@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_a_signal_among_many_optimizers(scene: Scene) -> None:
    """Who had his turn is complete, who had not is unchanged."""
    each(scene, signal_at, judge_signal, Crowd)


@pytest.mark.parametrize("scene", CROWDS, ids=str)
def test_a_failure_among_many_optimizers(scene: Scene) -> None:
    """One at most is damaged, and says so; loading mends it, and the others need nothing."""
    each(scene, failure_at, judge_failure, Crowd)
