"""Errors and interrupts while a step is queued, and at its fences, on a played card: nobody comes too early after them.

``PAGEDOPT_EVERY_LINE`` as in ``test_faults.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from injector import Outcome, interrupt_at
from often import MARKS, both_ways, call_by_call
from shots import EVERY, NEVER
from stand_ins import raising
from torch import nn
from torch.utils._pytree import tree_map

from pagedopt.common.patience import Patience
from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.pages import StagedGraph
from pagedopt.optim.pending import Pending
from pagedopt.optim.queue import QueuedStep
from tests.card.runs import Ends, Run, ends_of, play, played

pytestmark = [
    pytest.mark.timeout(7200 if EVERY else 120),
    *MARKS[not EVERY],
    pytest.mark.filterwarnings("ignore:this step was not queued.*no forward"),
]
WIDTH = 40


class Training:
    """Of two layers, attached if they are on a card; as many steps have been taken as come before a graph's first."""

    def __init__(self, run: Run) -> None:
        torch.default_generator.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(run.device)
        self.optimizer = run.adamw(self.model.parameters(), device_budget=0)
        self.optimizer.store.graphs.patience = Patience(1)  # in each round alike
        run.attach(self.optimizer, self.model)
        self.batch = run.numbers(4, WIDTH)
        self.step()
        dicts = [self.model.state_dict(), self.optimizer.state_dict()]
        self._saved = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, dicts)
        self.begin()

    def begin(self) -> None:
        """Take the second step, which goes call by call, and the third, which may be a graph's first."""
        self.step()
        self.step()

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()

    def restore(self) -> None:
        """Go back to the end of the first step, and begin again."""
        self.model.load_state_dict(self._saved[0])
        self.optimizer.load_state_dict(self._saved[1])
        self.begin()

    def prepared(self) -> Callable[[], Any]:
        """The fourth step, without the fence that it begins with."""
        self.gradients()
        self.optimizer.wait()
        return self.optimizer.step  # type: ignore[no-any-return]

    def go_on(self) -> None:
        """Read parameters, behind no fence if state is damaged; forget gradients; take steps until there are five."""
        if not self.optimizer.damaged:
            self.optimizer.wait()
        for p in self.model.parameters():
            p.detach().clone()
        self.optimizer.zero_grad()
        if self.optimizer.damaged:
            self.restore()
        while min(int(entry["step"]) for entry in self.optimizer.state.values()) < 5:
            self.step()

    def ends(self) -> Ends:
        self.optimizer.wait()
        return ends_of(self.model.parameters(), self.optimizer)


Places = Callable[[Training], Iterable[int]]
Round = Callable[[Training, int], object]


def play_rounds(monkeypatch: pytest.MonkeyPatch, places: Places, hit: Round, behind: Round) -> None:
    """On one card, at each place: hit the fourth step, then nothing is at fault, and the end is that of a CPU.

    Args:
        places: where to hit; called with a training that may be used up.
        hit: called with a training behind its third step, and the place.
        behind: what is done then.
    """
    rounds = 0

    def act(run: Run) -> Ends:
        nonlocal rounds
        training = Training(run)
        if run.card is None:
            training.go_on()
            return training.ends() * rounds
        ends: Ends = []
        for at in places(training):
            training.restore()
            hit(training, at)
            behind(training, at)
            ends += training.ends()
            run.card.order.wait()
            assert not run.card.faults, f"{at}: {run.card.faults}"
            rounds += 1
        as_graph = os.environ.get("PAGEDOPT_STAGED") != "calls"
        assert ("cuGraphLaunch" in run.card.driver.calls) == as_graph
        return ends

    play(monkeypatch, act, {})
    assert rounds > 2


def go_on(training: Training, _: int) -> None:
    training.go_on()


def wait_and_go_on(training: Training, _: int) -> None:
    training.optimizer.wait()
    training.go_on()


@call_by_call
def test_an_error_in_the_middle_of_queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream has waited for what was queued."""

    def places(training: Training) -> Iterable[int]:
        return range(len(training.optimizer._overlap._events))

    def hit(training: Training, at: int) -> None:
        step = training.prepared()
        with monkeypatch.context() as patched:
            patched.setattr(training.optimizer._overlap._events[at], "record", raising(OSError("says the test")))
            with pytest.raises(OSError, match="says the test"):
                step()
        assert "says the test" in training.optimizer.damaged

    play_rounds(monkeypatch, places, hit, go_on)


Begin = Callable[[Training], Callable[[], Any]]


def interrupts(begin: Begin, *of: Callable[..., Any], before: Sequence[int] = ()) -> tuple[Places, Round]:
    """Places and what hits them: Ctrl-C at each line of some functions, when it runs last, in what ``begin`` returns.

    Args:
        before: lines that are hit in each round.
    """

    def shoot(training: Training, at: int) -> Outcome:
        return interrupt_at((*before, at), signal.SIGINT, begin(training), of=of)

    def places(training: Training) -> list[int]:
        return shoot(training, NEVER).last_times

    def hit(training: Training, at: int) -> None:
        assert isinstance(shoot(training, at).error, KeyboardInterrupt)

    return places, hit


@both_ways
def test_a_second_interrupt_while_a_step_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is deferred; behind the second the current stream has waited."""
    lines = QueuedStep.launch, QueuedStep._launch_on, StagedGraph.launch
    play_rounds(monkeypatch, *interrupts(Training.prepared, *lines, before=[1]), go_on)


@call_by_call
def test_interrupts_while_the_stream_is_made_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in the middle of queueing: the next fence does it."""

    def begin(training: Training) -> Callable[[], Any]:
        step, event = training.prepared(), training.optimizer._overlap._events[1]

        def act() -> None:
            with monkeypatch.context() as patched:
                patched.setattr(event, "record", raising(OSError("says the test")))
                step()

        return act

    lines = QueuedStep.launch, QueuedStep.finish, QueuedStep.wait_for, QueuedStep._drop
    play_rounds(monkeypatch, *interrupts(begin, *lines, before=[1]), wait_and_go_on)


def evaluate(training: Training) -> None:
    with torch.no_grad():
        training.model(training.batch)


@both_ways
@pytest.mark.parametrize("act", [lambda t: t.optimizer.wait(), evaluate], ids=["wait", "forward"])
def test_an_interrupt_at_a_fence(monkeypatch: pytest.MonkeyPatch, act: Callable[[Training], object]) -> None:
    """Gradients are not given back too early, and what may be done behind the next forward is not taken for misuse."""

    def begin(training: Training) -> Callable[[], Any]:
        training.step()
        training.optimizer.zero_grad()
        return lambda: act(training)

    def behind(training: Training, _: int) -> None:
        evaluate(training)
        with torch.no_grad():
            for p in training.model.parameters():
                p.mul_(1)
        training.go_on()

    lines = (QueuedStep.start, QueuedStep._launch_on, QueuedStep._hold, Pending.let_go, QueuedStep.finish)
    lines += QueuedStep._drop, Overlap._finish, Overlap._end_of
    play_rounds(monkeypatch, *interrupts(begin, *lines), behind)


def test_a_second_interrupt_where_a_graph_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward.  The first is deferred; behind the second the step has been taken, or the optimizer is damaged."""

    def begin(training: Training) -> Callable[[], Any]:
        training.step()
        return lambda: evaluate(training)

    lines = QueuedStep._launch_on, StagedGraph.launch
    play_rounds(monkeypatch, *interrupts(begin, *lines, before=[1]), go_on)


@played()
def test_misuse_before_a_capture_is_told(run: Run) -> None:
    """The host waits for the step, as the stream cannot."""
    training = Training(run)
    training.step()
    with torch.no_grad():
        next(training.model.parameters()).clamp_(-0.1, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        training.model(training.batch)
    with pytest.raises(RuntimeError, match="a parameter was written before it was waited for"):
        training.optimizer.step()
    run.card.order.faults.clear()  # the misuse itself
