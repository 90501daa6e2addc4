"""Interrupts, and failures of calls, while a step is queued or within a backward: then training goes on.

``PAGEDOPT_EVERY_LINE`` as in ``test_faults.py``.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from file_support import open_files
from injector import Outcome, interrupt_at
from often import MARKS
from overlapped import Loop, Models, carriers, linears
from shots import (
    EVERY,
    NEVER,
    Shoot,
    assert_rose,
    at_lines_of,
    failure_at,
    hit,
    interrupted,
    last_times,
    signal_at,
    spread,
    two_at,
)
from stand_ins import raising, refusal
from torch import nn

from pagedopt.optim.launch import Work
from pagedopt.optim.overlap import everyone
from pagedopt.optim.overlap.cycle import Cycle
from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.overlap.record import Recorder
from pagedopt.optim.overlap.within import Within
from pagedopt.optim.pending import Pending
from pagedopt.optim.queue import QueuedStep
from pagedopt.placements.file import FileArena, FileMover
from tests.optim.within_toys import Held, adamw, arrive, bits, gradient, held, same

pytestmark = [
    pytest.mark.timeout(7200 if EVERY else 110),
    *MARKS[not EVERY],
    pytest.mark.filterwarnings("ignore:this step was not queued.*(no forward|was detached)"),
]
#: Returns what is done while a step of the loop is queued.
Prepare = Callable[[Loop], Callable[[], Any]]
#: Steps before the act.
TAKEN = 2


@pytest.fixture(autouse=True)
def nothing_is_left(folder: Path) -> Iterator[None]:
    before = len(carriers())
    yield
    gc.collect()
    assert len(carriers()) == before
    assert open_files(folder) == 0


def judging(go_on: Callable[[Any, Outcome, bool], object], shoot: Shoot) -> Callable[[Any, Outcome], None]:
    """What is raised rises, and a failure or a second interrupt may damage."""

    def judge(thing: Any, outcome: Outcome) -> None:
        if shoot is not failure_at:
            assert_rose(outcome)
        go_on(thing, outcome, shoot is failure_at or len(outcome.shots) > 1)

    return judge


# --- while a step is queued -------------------------------------------------------------------------------------------


def ready(
    attached: bool = True, make: Callable[[int], Models] = lambda width: [linears(width, 4)], steps: int = TAKEN
) -> Loop:
    """A small model whose update is queued."""
    return Loop(make).start(attached, steps)


@functools.cache
def plain() -> list[list[torch.Tensor]]:
    """Weights and state after ``TAKEN`` plain steps, and after each of three more."""
    loop = ready(attached=False)
    return [loop.values(), *((loop.train(1), loop.values())[1] for _ in range(3))]


def taken(loop: Loop) -> int:
    """How many steps the weights and state are of."""
    values = loop.values()
    found = [TAKEN + i for i, each in enumerate(plain()) if all(map(torch.equal, values, each))]
    assert found, "they are of no number of steps"
    return found[0]


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
    loop.train(1) if loop.number < TAKEN + 3 else None
    assert taken(loop) == loop.number


def hit_queued(prepare: Prepare, shoot: Shoot, shots: int = 0, go_on: Callable[..., object] = go_on) -> None:
    """Shoot so many times, or at each line."""
    plain()
    hit(ready, prepare, shoot, spread(shots) if shots else last_times, judging(go_on, shoot))


def a_step(loop: Loop) -> Callable[[], Any]:
    loop.gradients()
    return loop.opts[0].step  # type: ignore[no-any-return]


def an_iteration(loop: Loop) -> Callable[[], Any]:
    return functools.partial(loop.train, 1)


#: What is done while a step is queued.
ACTS: dict[str, Prepare] = {
    "wait": lambda loop: loop.opts[0].wait,
    "state_dict": lambda loop: loop.opts[0].state_dict,
    "state_dict of the model": lambda loop: loop.models[0].state_dict,
    "step": a_step,
    "set_device_budget": lambda loop: functools.partial(loop.opts[0].set_device_budget, "50%"),
    "zero_grad(False)": lambda loop: functools.partial(loop.opts[0].zero_grad, False),
    "evaluation": lambda loop: functools.partial(torch.no_grad()(loop.models[0]), loop.batch()),
    "detach": lambda loop: loop.opts[0].detach,
}


@pytest.mark.parametrize("shoot", [signal_at, failure_at])
@pytest.mark.parametrize("shots", [4, pytest.param(60, marks=pytest.mark.long)])
def test_an_iteration_is_hit(shoot: Shoot, shots: int) -> None:
    hit_queued(an_iteration, shoot, shots)


@pytest.mark.long
@pytest.mark.parametrize("shoot", [signal_at, failure_at, two_at])
@pytest.mark.parametrize("act", ACTS)
def test_an_act_is_hit(act: str, shoot: Shoot) -> None:
    hit_queued(ACTS[act], shoot, 60)


#: What may lose a step that is queued.
FENCE = (
    Overlap.wait, Overlap._finish, Overlap._end_of, everyone.wait_if_alive, QueuedStep.finish, QueuedStep.wait_for,
)  # fmt: skip


def test_each_line_of_a_fence_is_hit() -> None:
    hit_queued(ACTS["wait"], at_lines_of(*FENCE))


def _of_the_model(loop: Loop, outcome: Outcome, _: bool) -> None:
    values = loop.models[0].state_dict().values()
    assert all(map(torch.equal, values, plain()[0]))
    assert not everyone.with_queued


def test_each_line_of_a_fence_is_hit_while_the_optimizer_is_deleted() -> None:
    """The model waits by itself."""
    hit_queued(lambda loop: loop.opts.clear, at_lines_of(*FENCE), go_on=_of_the_model)


def test_a_second_interrupt_while_a_step_is_queued() -> None:
    """It has been taken, it has not, or it says that it is damaged: it is never carried out without being counted."""
    hit_queued(a_step, at_lines_of(Overlap._queue, QueuedStep.launch, Work.write_numbers, gap=1))


def test_a_second_interrupt_whose_handler_saves_while_a_step_is_queued() -> None:
    """It is told that the state is damaged, and does not raise; the step is taken, or says the same."""
    told: list[str] = []

    def shoot(at: int) -> tuple[Loop, Outcome]:
        loop = ready()
        step, handler = a_step(loop), lambda *_: told.append(refusal(loop.opts[0].state_dict))
        lines = Overlap._queue, QueuedStep.launch, Work.write_numbers
        return loop, interrupt_at((at, at + 1), signal.SIGINT, step, of=lines, handler=handler)

    for at in shoot(NEVER)[1].last_times:
        go_on(*shoot(at), may_be_damaged=True)
    assert any("a step ended in the middle" in each for each in told)


def test_a_fence_in_another_thread_waits_until_a_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbers, threads = Work.write_numbers, list[threading.Thread]()

    def write(self: Work) -> None:
        threads.append(threading.Thread(target=loop.models[0].state_dict))
        threads[0].start()
        threads[0].join(0.2)
        write_numbers(self)

    loop = ready()
    step = a_step(loop)
    monkeypatch.setattr(Work, "write_numbers", write)
    step()
    threads[0].join()
    assert taken(loop) == TAKEN + 1


def test_a_step_that_could_not_be_counted_stays_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fence carries it out, and then says that all is well."""
    want, loop = plain()[0], ready()
    a_step(loop)
    monkeypatch.setattr(Work, "write_numbers", raising(OSError("says the test")))
    with pytest.raises(OSError, match="says the test"):
        loop.opts[0].step()
    loop.opts[0].wait()
    assert "says the test" in loop.opts[0].damaged
    assert all(map(torch.equal, loop.models[0].parameters(), want))


def test_an_error_between_two_launches_leaves_no_page_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the error is kept."""
    loop = ready()
    let_go = Pending.let_go

    def fail(self: Pending, first: int, stop: int) -> None:
        if first == 2:
            raise OSError("says the test")
        let_go(self, first, stop)

    monkeypatch.setattr(Pending, "let_go", fail)
    with pytest.raises(OSError, match="says the test") as raised:
        loop.opts[0].wait()
    assert not carriers()
    assert "says the test" in loop.opts[0].damaged
    assert raised.value


def test_an_interrupt_does_not_swallow_misuse() -> None:
    """It is told by the step that is interrupted, or by the next one."""

    def misused(loop: Loop) -> Callable[[], Any]:
        with torch.no_grad():
            next(loop.models[0].parameters()).clamp_(-0.1, 0.1)
        loop.gradients()
        return loop.opts[0].step  # type: ignore[no-any-return]

    def told(loop: Loop, outcome: Outcome, _: bool) -> None:
        errors = outcome.error, outcome.error and outcome.error.__context__
        assert "before it was waited for" in "".join(map(str, errors)) + refusal(loop.opts[0].step)

    hit_queued(misused, at_lines_of(Overlap.take, Overlap._finish, Overlap._end_of), go_on=told)


@pytest.mark.parametrize("fence", [everyone._before_exit, everyone._before_fork])
def test_one_that_fails_or_is_interrupted_does_not_keep_others_from_being_carried_out(fence: Callable[[], Any]) -> None:
    """Before a process ends, or forks: nobody is there to do it once more."""
    for at in (1, 2, 5):
        loops = [ready() for _ in range(3)]
        broken: Any = loops[1].opts[0]._overlap.queued
        broken.wait_for = raising(OSError("says the test"))
        outcome = interrupt_at(at, signal.SIGINT, fence, of=(Overlap.wait, Overlap._finish))
        assert isinstance(outcome.error, KeyboardInterrupt)
        for each in (loops[0], loops[2]):
            assert each.opts[0]._overlap.queued is None
            assert all(map(torch.equal, each.models[0].parameters(), plain()[0]))
        del broken.wait_for
        assert taken(loops[1]) == TAKEN


@pytest.mark.parametrize("rounds", [24, pytest.param(600, marks=pytest.mark.long)])
def test_sigint_at_random_times(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop that saves after each step: what is counted has been taken, and nothing else."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # it may rise in a finalizer
    many = lambda width: [nn.Sequential(*(nn.LayerNorm(width) for _ in range(40)))]  # noqa: E731
    loop, twin = ready(make=many), ready(False, many)
    (opt,), (model,) = loop.opts, loop.models

    def iteration() -> None:
        opt.zero_grad()
        loop.train(1)
        copy.deepcopy(opt.state_dict())

    chance = random.Random(rounds)
    for number in range(rounds):
        while not interrupted(iteration, chance.uniform(0, 0.05)):
            pass
        loop.number = int(opt.state[next(model.parameters())]["step"])
        twin.train(loop.number - twin.number)
        assert all(map(torch.equal, loop.values(), twin.values())), f"after {number + 1} interrupts"
    assert loop.hidden() > 0


#: In the middle of what a signal handler may come, and calls itself.
SHARED = (
    Overlap.begin, Overlap.enter, Overlap.leave, Overlap._end, Overlap._end_of, QueuedStep.wait_for,
    QueuedStep._carry_out,
)  # fmt: skip


RECORDED = Recorder.__torch_function__, Recorder._note, Recorder.enter, Recorder.leave, Overlap._end
SOME = [pytest.param(TAKEN, SHARED, id="shared"), pytest.param(0, RECORDED, id="recorded")]
ALL = [pytest.param(steps, (), id=f"all, behind {steps} steps", marks=pytest.mark.long) for steps in (TAKEN, 0)]


@pytest.mark.parametrize(("steps", "of"), [*SOME, *ALL])
def test_a_signal_handler_calls_the_model_and_saves(steps: int, of: tuple[Callable[..., Any], ...]) -> None:
    """It may come at each line; an error in one of its calls, which it handles, harms nothing."""

    def handle(loop: Loop) -> None:
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="shapes"):
                loop.models[0](torch.zeros(3, 7))
            loop.models[0](loop.batch())
        loop.opts[0].state_dict()

    def shoot(at: int) -> tuple[Loop, Outcome]:
        loop = ready(steps=steps)
        handler = lambda *_: handle(loop)  # noqa: E731
        return loop, interrupt_at(at, signal.SIGALRM, an_iteration(loop), of=of, handler=handler)

    for at in shoot(NEVER)[1].last_times:
        loop, outcome = shoot(at)
        assert outcome.error is None, f"{outcome.shots}: {outcome.error!r}"
        loop.train(max(0, TAKEN - loop.number))
        assert taken(loop) == loop.number, outcome.shots
        assert loop.opts[0]._overlap._calls.now is None, outcome.shots


# --- in the hooks of a backward, and in the step() behind it --------------------------------------------------------


class Toy:
    """After ``taken`` steps within backwards."""

    def __init__(self, taken: int) -> None:
        self.model, self.taken = held(), taken
        self.opt = adamw(self.model)
        self.opt.attach(self.model, overlap="backward")
        for step in range(taken):
            arrive(self.model, step)
            self.opt.step()
        self.before = [p.detach().clone() for p in self.model.parameters()]

    def backward(self) -> None:
        arrive(self.model, self.taken)

    def step(self) -> None:
        self.opt.step()


def end(toy: Toy, outcome: Outcome, may_be_damaged: bool) -> None:
    """The step ends with the gradients that came, as a plain step with those alone; or state is damaged and says so."""
    heard = outcome.error is not None
    if not toy.opt.damaged:
        try:
            toy.opt.step()
        except (MemoryError, OSError):  # of the thread that carries pages
            heard = True
            assert toy.opt.damaged
    if toy.opt.damaged:
        assert may_be_damaged, toy.opt.damaged
        assert heard, "nobody heard of it"
        with pytest.raises(RuntimeError, match="is damaged"):
            toy.opt.step()
        return
    toy.opt.zero_grad()
    updated = [not torch.equal(p, old) for p, old in zip(toy.model.parameters(), toy.before, strict=True)]
    other: Held = held()
    plain = adamw(other)
    for step in range(toy.taken + 2):
        for i, p in enumerate(other.parameters()):
            p.grad = gradient(p, i, step) if step != toy.taken or updated[i] else None
        plain.step()
    arrive(toy.model, toy.taken + 1)
    toy.opt.step()
    assert same(bits(toy.model, toy.opt), bits(other, plain))


def a_backward(toy: Toy) -> Callable[[], Any]:
    return toy.backward


def its_step(toy: Toy) -> Callable[[], Any]:
    """Behind a backward that has left some pages with a part of their gradients."""
    arrive(toy.model, toy.taken, (6, 4, 2, 0))
    return toy.step


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("shoot", [signal_at, failure_at, two_at])
@pytest.mark.parametrize("act", [a_backward, its_step])
@pytest.mark.parametrize("shots", [8, pytest.param(150, marks=pytest.mark.long)])
def test_it_is_hit(act: Callable[[Toy], Callable[[], Any]], shoot: Shoot, taken: int, shots: int) -> None:
    hit(lambda: Toy(taken), act, shoot, spread(shots), judging(end, shoot))


def test_each_line_that_takes_a_gradient_is_hit() -> None:
    shoot = at_lines_of(Within.gradient_came, Cycle.take, Cycle._go_on, Cycle._keep)
    hit(lambda: Toy(1), a_backward, shoot, last_times, judging(end, shoot))


def test_each_line_that_ends_a_step_is_hit_twice() -> None:
    shoot = at_lines_of(Within.finish, Cycle.finish, Cycle.put_state, gap=1)
    hit(lambda: Toy(1), its_step, shoot, last_times, judging(end, shoot))


def test_a_failure_before_anything_was_updated_gives_gradients_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is damaged, and the step behind it is a plain one."""
    toy = Toy(1)
    params = [*toy.model.parameters()]
    arrive(toy.model, 1, [3])  # its page waits for others
    monkeypatch.setattr(FileMover, "arrive", raising(OSError(5, "broken, says the test")))
    with pytest.raises(OSError, match="says the test"):
        arrive(toy.model, 1, [6])
    monkeypatch.undo()
    assert [i for i, p in enumerate(params) if p.grad is not None] == [3, 6]
    end(toy, Outcome(), may_be_damaged=False)


def test_a_page_that_cannot_be_written_back_damages_state(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(1)
    monkeypatch.setattr(FileArena, "evict", raising(OSError(5, "broken, says the test")))
    toy.backward()
    with pytest.raises(OSError, match="says the test"):
        toy.opt.step()
    monkeypatch.undo()
    assert "a step within a backward failed in the middle (OSError" in toy.opt.damaged
    with pytest.raises(RuntimeError, match="is damaged"):
        toy.backward()


def test_a_step_of_which_damage_is_known_is_not_ended() -> None:
    """As a second interrupt leaves it, which comes before the launch can be caught."""
    toy, before = Toy(1), Toy(1).opt.state_dict()
    toy.backward()
    toy.opt.damaged = "a step within a backward ended in the middle"
    with pytest.raises(RuntimeError, match="is damaged"):
        toy.opt.step()
    toy.opt.load_state_dict(before)
    toy.backward()
    toy.opt.step()


def test_new_state_of_a_first_step_that_failed_is_put_into_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds new values: a later step must not take it for state of zeros."""
    toy = Toy(0)
    monkeypatch.setattr(FileMover, "evict", raising(OSError(5, "broken, says the test")))
    with pytest.raises(OSError, match="says the test"):
        toy.backward()
    monkeypatch.undo()
    assert toy.opt.damaged
    assert [*toy.opt.state] == [[*toy.model.parameters()][-1]]
