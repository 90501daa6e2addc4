"""What a step does, as a value: launches, and between them the visits of pages to the device.  No memory is touched.

A plan is a list of steps, made by :func:`plan` or in any other order, and :func:`carry_out` is the loop around it::

    >>> for step in plan((0, 7), [(Move(0, 3, 0), (7, 9)), (Move(0, 4, 1), (9, 12))], slots=2): print(step)
    Fetch(move=Move(arena=0, page=3, slot=0))
    Fetch(move=Move(arena=0, page=4, slot=1))
    Launch(span=(0, 7))
    Arrive(move=Move(arena=0, page=3, slot=0))
    Launch(span=(7, 9))
    Evict(move=Move(arena=0, page=3, slot=0))
    Arrive(move=Move(arena=0, page=4, slot=1))
    Launch(span=(9, 12))
    Evict(move=Move(arena=0, page=4, slot=1))
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .policy import SLOTS, Move

#: Chunks of a table, from the first to before the second.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to bring a page into its slot, which is empty or being emptied."""

    move: Move


@dataclass(frozen=True, slots=True)
class Arrive:
    """What is launched from now on finds the page in its slot."""

    move: Move


@dataclass(frozen=True, slots=True)
class Launch:
    """Update the chunks of a span; None: all."""

    span: Span | None


@dataclass(frozen=True, slots=True)
class Evict:
    """Begin to bring a page back, as it is after what was launched so far."""

    move: Move


Action = Fetch | Arrive | Launch | Evict
#: What a step does whose pages are all where they are used.
WHOLE: tuple[Action, ...] = (Launch(None),)


def plan(at_hand: Span | None, moves: Sequence[tuple[Move, Span]], slots: int = SLOTS) -> list[Action]:
    """Launch what is at hand, then each span while its page is in its slot; fetch as early as slots allow.

    Args:
        at_hand: a half-open range of chunks that need no page; None or empty: there are none.
        moves: each with its range of chunks, in the order of the updates.  A slot may be named again at any distance.
        slots: how many pages may be on the device at a time.

    Raises:
        ValueError: there is no slot.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; pages need at least 1 to pass through")
    steps: list[Action] = []
    waiting, inside = deque(move for move, _ in moves), deque[int]()

    def fetch_ahead() -> None:
        while waiting and len(inside) < slots and waiting[0].slot not in inside:
            steps.append(Fetch(waiting[0]))
            inside.append(waiting.popleft().slot)

    fetch_ahead()
    if at_hand is not None and at_hand[0] < at_hand[1]:
        steps.append(Launch(at_hand))
    for move, span in moves:
        steps += Arrive(move), Launch(span), Evict(move)
        inside.popleft()
        fetch_ahead()
    return steps


class Mover(Protocol):
    """Carries moves out: ``begin``; then ``fetch``, ``arrive``, ``evict`` for each, in this order; then ``finish``."""

    def begin(self) -> None:
        """Moves follow."""

    def fetch(self, move: Move) -> None:
        """See :class:`Fetch`."""

    def arrive(self, move: Move) -> None:
        """See :class:`Arrive`."""

    def evict(self, move: Move) -> None:
        """See :class:`Evict`."""

    def finish(self) -> None:
        """What comes next finds every page where it rests.

        Raises:
            MemoryError, OSError: a page could not be brought there.
        """


def carry_out(steps: Iterable[Action], launch: Callable[[Span | None], object], mover: Mover | None = None) -> None:
    """Do what a plan says.

    If anything fails, pages that were fetched are brought back as they are: the one in use with what was done to it.
    A page that came in part is not: what is in its slot is partly another's.  The mover is finished in any case.

    Args:
        launch: updates a span.
        mover: moves pages; None: the plan has launches alone.

    Raises:
        ValueError: the plan ends with pages in their slots, which have been brought back; or moves some with no mover.
        BaseException: the first that ``steps``, ``mover`` or ``launch`` has raised.
    """
    if mover is None:
        for step in steps:
            if not isinstance(step, Launch):
                raise ValueError(f"{step} needs a mover")
            launch(step.span)
        return
    fetched: dict[int, Move] = {}  # by slot: pages on their way
    here: dict[int, Move] = {}  # and those that have arrived
    mover.begin()
    try:
        for step in steps:
            match step:
                case Fetch(move):
                    mover.fetch(move)
                    fetched[move.slot] = move  # now: a page that came in part must not be brought back
                case Arrive(move):
                    mover.arrive(move)
                    here[move.slot] = fetched.pop(move.slot)
                case Launch(span):
                    launch(span)
                case Evict(move):
                    del here[move.slot]  # now: what fails is not tried again
                    mover.evict(move)
        if fetched or here:
            raise ValueError(f"the plan ends with pages in their slots: {[*here.values(), *fetched.values()]}")
    except BaseException:
        try:
            _bring_back(mover, here.values(), fetched.values())
        finally:
            with contextlib.suppress(Exception):
                mover.finish()
        raise
    mover.finish()


def _bring_back(mover: Mover, here: Iterable[Move], fetched: Iterable[Move]) -> None:
    """As far as it goes: the error that got us here says more."""
    for move in here:
        with contextlib.suppress(Exception):
            mover.evict(move)
    for move in fetched:
        with contextlib.suppress(Exception):
            mover.arrive(move)
            mover.evict(move)
