"""Where to hit an operation with what, and how to judge what came of it."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from injector import Alarm, Outcome, fail_at, interrupt_at

#: 1: every line and every call; a larger number: every so many of them.
EVERY = int(os.environ.get("PAGEDOPT_EVERY_LINE", "0"))
#: How many places of each operation are hit, by placement: files take longer.
SHOTS = {"resident": 4, "spilled": 2, "half": 2}
ERRORS: tuple[Callable[[], BaseException], ...] = (
    MemoryError,
    lambda: OSError(errno.ENOSPC, "no space, says the test"),
    lambda: OSError(errno.EIO, "broken, says the test"),
)
#: Lines between one interrupt and the second.
GAPS = (1, 7, 60)
#: What keeps signals has the most moments at which it may go wrong.
GUARD = "system/interrupts.py"
NEVER = 1 << 40
Shoot = Callable[[int, Callable[[], Any]], Outcome]


def places(scene: Any, files: list[str]) -> list[int]:
    """Which of the events, of which the files are given, to hit: evenly spread, others in each scene, and the guard."""
    stride = EVERY or max(1, len(files) // SHOTS[scene.placement])
    first = zlib.crc32(str(scene).encode())
    guard = [number for number, file in enumerate(files, 1) if file == GUARD]
    chosen = {guard[(first + i * len(guard) // 4) % len(guard)] for i in range(4)} if guard else set()
    return sorted(chosen.union(range(1 + first % stride, len(files) + 1, stride)))


def hit(
    make: Callable[[], Any],
    begin: Callable[[Any], Callable[[], Any]],
    shoot: Shoot,
    places: Callable[[Outcome], Iterable[int]],
    judge: Callable[[Any, Outcome], object],
) -> None:
    """Shoot at what ``begin`` returns of a thing of its own, at each of some places, and judge what came of it."""
    wrong: list[str] = []
    for place in places(shoot(NEVER, begin(make()))):
        thing, outcome = make(), None
        act = begin(thing)
        try:
            outcome = shoot(place, act)
            judge(thing, outcome)
        except Exception as error:
            what = f"{outcome.shots} raised {outcome.error!r}" if outcome else "in the operation"
            wrong.append(f"{place}: {what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} places", *wrong[:20]])


def each(scene: Any, shoot: Shoot, judge: Callable[[Any, Outcome], object], stage_of: Any) -> None:
    """Shoot at the ``act`` of a stage, and judge what came of it."""
    stage_of.expected(scene)
    hit(lambda: stage_of(scene), lambda stage: stage.act, shoot, lambda seen: places(scene, seen.files), judge)


def last_times(seen: Outcome) -> Iterable[int]:
    """Each line, when it is run last."""
    assert seen.events, "there is nothing to hit"
    return range(1, seen.events + 1, EVERY) if EVERY else seen.last_times


def spread(shots: int) -> Callable[[Outcome], Iterable[int]]:
    """So many places, if there are."""
    return lambda seen: range(1, seen.events + 1, EVERY or max(1, seen.events // shots))


def assert_rose(outcome: Outcome) -> None:
    """What a handler raises, rises; unless it was raised where Python lets nothing rise."""
    kinds = (KeyboardInterrupt, Alarm)
    dropped = any(isinstance(error, kinds) for error in outcome.unraisable)
    dropped |= outcome.in_finalizer
    assert isinstance(outcome.error, kinds) or dropped or not outcome.shots, repr(outcome.error)


def judge_signal(stage: Any, outcome: Outcome) -> None:
    """It rises, and nothing is damaged."""
    assert_rose(outcome)
    assert stage.verdict(may_be_damaged=False) == "after" or outcome.error is not None


def judge_failure(stage: Any, outcome: Outcome) -> None:
    """It may damage, and is heard of unless all is done."""
    assert outcome.error is None or isinstance(outcome.error, Exception)
    assert stage.verdict(may_be_damaged=True) == "after" or outcome.error is not None, "nobody heard of it"


def judge_two(stage: Any, outcome: Outcome) -> None:
    """The first rises; the second may damage."""
    assert_rose(outcome)
    stage.verdict(may_be_damaged=len(outcome.shots) > 1, torn=True)


def signal_at(at: int, act: Callable[[], Any]) -> Outcome:
    """Ctrl-C, or in every other place SIGALRM with a handler that raises."""
    return interrupt_at(at, (signal.SIGINT, signal.SIGALRM)[at % 2], act)


def failure_at(at: int, act: Callable[[], Any]) -> Outcome:
    """One of ``ERRORS``."""
    return fail_at(at, ERRORS[at % 3](), act)


def two_at(at: int, act: Callable[[], Any]) -> Outcome:
    """Ctrl-C, and again some lines later."""
    return interrupt_at((at, at + GAPS[at % 3]), signal.SIGINT, act)


def at_lines_of(*functions: Callable[..., Any], gap: int = 0) -> Shoot:
    """Ctrl-C at a line of these, and once more after so many of their lines."""

    def shoot(at: int, act: Callable[[], Any]) -> Outcome:
        return interrupt_at((at, at + gap) if gap else at, signal.SIGINT, act, of=functions)

    return shoot


def interrupted(act: Callable[[], Any], delay: float) -> bool:
    """Return whether a SIGINT, sent by another thread after so many seconds, is raised in ``act`` or just after it."""
    main = threading.get_ident()

    def send() -> None:
        time.sleep(delay)
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send)
    try:
        sender.start()
        act()
        sender.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        return True
    finally:
        sender.join()
    return False
