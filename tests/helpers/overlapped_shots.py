"""A model whose update is queued, what hits it, and whether training goes on right."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from injector import Outcome, interrupt_at
from overlapped import Loop, Models, linears
from shots import EVERY, NEVER, assert_rose, failure_at

Shoot = Callable[[int, Callable[[], Any]], Outcome]
#: Returns what is done while a step of the loop is queued.
Prepare = Callable[[Loop], Callable[[], Any]]
#: Steps before the act.
TAKEN = 2


def ready(
    attached: bool = True, make: Callable[[int], Models] = lambda width: [linears(width, 4)], steps: int = TAKEN
) -> Loop:
    """A small model whose update is queued."""
    loop = Loop(make)
    loop.start(attached)
    loop.train(steps)
    return loop


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


def hit(prepare: Prepare, shoot: Shoot, shots: int = 0, judge: Callable[[Loop, Outcome, bool], object] = go_on) -> None:
    """Shoot so many times (0: once at each line, when it is run last) at an act of a loop of its own; judge each."""
    plain()
    loop = ready()
    seen = shoot(NEVER, prepare(loop))
    assert seen.events, "there is nothing to hit"
    wrong = []
    for at in range(1, seen.events + 1, EVERY or max(1, seen.events // shots)) if EVERY or shots else seen.last_times:
        loop = ready()
        outcome = shoot(at, prepare(loop))
        try:
            if shoot is not failure_at:
                assert_rose(outcome)
            judge(loop, outcome, shoot is failure_at or len(outcome.shots) > 1)
        except Exception as error:
            wrong.append(f"{at}: {outcome.shots} raised {outcome.error!r}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} places", *wrong[:20]])


def a_step(loop: Loop) -> Callable[[], Any]:
    loop.gradients()
    return loop.opts[0].step  # type: ignore[no-any-return]


def an_evaluation(loop: Loop) -> Callable[[], Any]:
    return functools.partial(torch.no_grad()(loop.models[0]), loop.batch())


def carriers() -> list[threading.Thread]:
    """The threads that carry pages."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("pagedopt-file")]


def at_lines_of(*functions: Callable[..., Any], gap: int = 0) -> Shoot:
    """Ctrl-C at a line of these, and once more after so many of their lines."""

    def shoot(at: int, act: Callable[[], Any]) -> Outcome:
        return interrupt_at((at, at + gap) if gap else at, signal.SIGINT, act, of=functions)

    return shoot
