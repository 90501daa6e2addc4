"""The visits of pages to the device, one after the other: fetch, update, evict.  No memory is touched here."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol

from .policy import Move

Span = tuple[int, int]


class Mover(Protocol):
    """Carries moves out: ``begin``; then ``fetch``, ``arrive``, ``evict`` for each, in this order; then ``finish``."""

    def begin(self) -> None:
        """Moves follow."""

    def fetch(self, move: Move) -> None:
        """Begin to bring a page into its slot, which is empty or being emptied."""

    def arrive(self, move: Move) -> None:
        """What is launched from now on finds the page in its slot."""

    def evict(self, move: Move) -> None:
        """Begin to bring a page back, as it is after what was launched so far."""

    def finish(self) -> None:
        """What comes next finds every page where it rests.

        Raises:
            MemoryError, OSError: a page could not be brought there.
        """


def spans(
    resident: Span | None, moves: Sequence[tuple[Move, Span]], slots: int, mover: Mover
) -> Generator[Span, None, None]:
    """What to launch one after the other: ``resident``, then the span of each move while its page is in its slot.

    Between the spans the moves are carried out, up to ``slots`` of them at a time.  If the caller stops early, or
    throws an error into it, pages that were fetched are evicted as they are: the one in use with what was done to it.
    Close it (``contextlib.closing``) so that this happens at once.

    Args:
        resident: a half-open range of chunks that need no page; None or empty: there are none.
        moves: each with its range of chunks.  A slot may be named again at any distance.

    Raises:
        ValueError: there is no slot.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; pages need at least 1 to pass through")
    waiting = deque(moves)
    visiting: deque[tuple[Move, Span]] = deque()

    def fetch_ahead() -> None:
        while waiting and len(visiting) < slots and all(waiting[0][0].slot != move.slot for move, _ in visiting):
            mover.fetch(waiting[0][0])
            visiting.append(waiting.popleft())  # now: a page that came in part must not be brought back

    here: Move | None = None
    mover.begin()
    try:
        fetch_ahead()
        if resident is not None and resident[0] < resident[1]:
            yield resident
        while visiting:
            move, span = visiting[0]
            mover.arrive(move)
            here = move
            yield span
            visiting.popleft()
            mover.evict(move)
            fetch_ahead()
    except BaseException:
        for move, _ in visiting:
            with contextlib.suppress(Exception):  # the error that got us here says more
                if move is not here:
                    mover.arrive(move)
                mover.evict(move)
        raise
    finally:
        mover.finish()
