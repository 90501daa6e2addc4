"""What a step does, as a value: launches, and between them the visits of pages to the device.  No memory is touched.

A plan is a list of actions; :func:`plan` makes one, and :func:`passes` executes it, launch by launch::

    >>> for action in plan((0, 7), [(Move(0, 3, 0), (7, 9)), (Move(0, 4, 1), (9, 12))], slots=2): print(action)
    Fetch(move=Move(arena=0, page=3, slot=0))
    Fetch(move=Move(arena=0, page=4, slot=1))
    Update(span=(0, 7))
    Arrive(move=Move(arena=0, page=3, slot=0))
    Update(span=(7, 9))
    Evict(move=Move(arena=0, page=3, slot=0))
    Arrive(move=Move(arena=0, page=4, slot=1))
    Update(span=(9, 12))
    Evict(move=Move(arena=0, page=4, slot=1))
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .policy import SLOTS, Move

#: A half-open range of chunks of a table.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to copy a page into its slot, which is empty or being emptied."""

    move: Move


@dataclass(frozen=True, slots=True)
class Arrive:
    """Let launches from now on wait until the page is in its slot."""

    move: Move


@dataclass(frozen=True, slots=True)
class Update:
    """Update the chunks of a span; None: of the whole table."""

    span: Span | None


@dataclass(frozen=True, slots=True)
class Evict:
    """Begin to copy a page back, as it is after the launches so far."""

    move: Move


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing until the caller asks for more: what comes next is not known yet."""


Action = Fetch | Arrive | Update | Evict | Pause
#: The plan of a step without visits.
WHOLE: tuple[Action, ...] = (Update(None),)


def plan(at_hand: Span | None, moves: Sequence[tuple[Move, Span]], slots: int = SLOTS) -> list[Action]:
    """Return a plan: launch what is at hand, then each span while its page is in its slot; fetch as early as possible.

    Args:
        at_hand: the chunks that need no visit; None or empty: there are none.
        moves: each with its chunks, in the order of the updates.  Any two moves may have the same slot.
        slots: how many pages may be in slots at a time, at least 1 (or ValueError).
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; pages need at least 1 to pass through")
    actions: list[Action] = []
    waiting, inside = deque(move for move, _ in moves), deque[int]()

    def fetch_ahead() -> None:
        while waiting and len(inside) < slots and waiting[0].slot not in inside:
            actions.append(Fetch(waiting[0]))
            inside.append(waiting.popleft().slot)

    fetch_ahead()
    if at_hand is not None and at_hand[0] < at_hand[1]:
        actions.append(Update(at_hand))
    for move, span in moves:
        actions += Arrive(move), Update(span), Evict(move)
        inside.popleft()
        fetch_ahead()
    return actions


class Mover(Protocol):
    """What moves pages: ``begin``; then for each move ``fetch``, ``arrive``, ``evict``; then ``finish``."""

    def begin(self) -> None:
        """Get ready for moves."""

    def fetch(self, move: Move) -> None:
        """See :class:`Fetch`."""

    def arrive(self, move: Move) -> None:
        """See :class:`Arrive`."""

    def evict(self, move: Move) -> None:
        """See :class:`Evict`."""

    def finish(self) -> None:
        """Let later work wait until every page is back; MemoryError or OSError if one could not be copied back."""


def passes(
    actions: Iterable[Action], launch: Callable[[Span | None], object], mover: Mover | None = None
) -> Generator[None]:
    """Execute a plan and yield behind each launch, and in each pause.

    ``launch`` updates a span, ``mover`` moves pages (None: the plan has only launches).

    If anything fails, or the iterator is closed before its end, fetched pages are brought back as they are, updated or
    not.  A page whose fetch failed is not, because its slot still holds part of another page.  The mover is finished in
    any case.

    Raises:
        ValueError: the plan ends with pages in their slots, which have been brought back; or it needs a mover.
        BaseException: the first error of ``actions``, ``mover`` or ``launch``.
    """
    if mover is None:
        for action in actions:
            if isinstance(action, Update):
                launch(action.span)
            elif not isinstance(action, Pause):
                raise ValueError(f"{action} needs a mover")
            yield
        return
    fetched: dict[int, Move] = {}  # by slot: pages on their way in
    here: dict[int, Move] = {}  # by slot: pages that have arrived
    mover.begin()
    try:
        for action in actions:
            match action:
                case Fetch(move):
                    mover.fetch(move)
                    fetched[move.slot] = move  # not before: a page whose fetch failed must not be brought back
                case Arrive(move):
                    mover.arrive(move)
                    here[move.slot] = fetched.pop(move.slot)
                case Update(span):
                    launch(span)
                    yield
                case Evict(move):
                    del here[move.slot]  # before: an evict that fails is not tried again
                    mover.evict(move)
                case Pause():
                    yield
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
    """Bring pages back as far as possible; further errors are suppressed, as the first one says more."""
    for move in here:
        with contextlib.suppress(Exception):
            mover.evict(move)
    for move in fetched:
        with contextlib.suppress(Exception):
            mover.arrive(move)
            mover.evict(move)
