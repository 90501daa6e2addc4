"""Interrupts, and failures of calls, in the hooks of a backward and in the step() behind it: then training goes on.

``PAGEDOPT_EVERY_LINE`` as in ``test_faults.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from file_support import open_files
from injector import Outcome
from often import MARKS
from overlapped_shots import Shoot, at_lines_of, carriers
from shots import EVERY, NEVER, assert_rose, failure_at, signal_at, two_at
from stand_ins import raising
from within import Held, adamw, arrive, bits, gradient, held, same

from pagedopt.optim.overlap.cycle import Cycle
from pagedopt.optim.overlap.within import Within
from pagedopt.placements.file import FileArena, FileMover

pytestmark = [pytest.mark.timeout(7200 if EVERY else 110), *MARKS[not EVERY]]


@pytest.fixture(autouse=True)
def _nothing_is_left(folder: Path) -> Iterator[None]:
    before = len(carriers())
    yield
    gc.collect()
    assert len(carriers()) == before
    assert open_files(folder) == 0


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


def go_on(toy: Toy, outcome: Outcome, may_be_damaged: bool) -> None:
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


def hit(begin: Callable[[Toy], Callable[[], Any]], shoot: Shoot, shots: int, taken: int = 1) -> None:
    """Shoot so many times (0: once at each line, when it is run last) at an act of a toy of its own; judge each."""
    seen = shoot(NEVER, begin(Toy(taken)))
    assert seen.events, "there is nothing to hit"
    stride = EVERY or max(1, seen.events // max(1, shots))
    wrong = []
    for at in range(1, seen.events + 1, stride) if EVERY or shots else seen.last_times:
        toy = Toy(taken)
        outcome = shoot(at, begin(toy))
        try:
            if shoot is not failure_at:
                assert_rose(outcome)
            go_on(toy, outcome, shoot is failure_at or len(outcome.shots) > 1)
        except Exception as error:
            wrong.append(f"{at}: {outcome.shots} raised {outcome.error!r}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} places", *wrong[:20]])


def a_backward(toy: Toy) -> Callable[[], Any]:
    return toy.backward


def a_step(toy: Toy) -> Callable[[], Any]:
    """Behind a backward that has left some pages with a part of their gradients."""
    arrive(toy.model, toy.taken, (6, 4, 2, 0))
    return toy.step


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("shoot", [signal_at, failure_at, two_at])
@pytest.mark.parametrize("act", [a_backward, a_step])
@pytest.mark.parametrize("shots", [8, pytest.param(150, marks=pytest.mark.long)])
def test_it_is_hit(act: Callable[[Toy], Callable[[], Any]], shoot: Shoot, taken: int, shots: int) -> None:
    hit(act, shoot, shots, taken)


def test_each_line_that_takes_a_gradient_is_hit() -> None:
    hit(a_backward, at_lines_of(Within.gradient_came, Cycle.take, Cycle._go_on, Cycle._keep), 0)


def test_each_line_that_ends_a_step_is_hit_twice() -> None:
    hit(a_step, at_lines_of(Within.finish, Cycle.finish, Cycle.put_state, gap=1), 0)


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
    go_on(toy, Outcome(), may_be_damaged=False)


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
