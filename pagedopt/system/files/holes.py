"""An allocator for parts of a range of bytes."""

from __future__ import annotations


class Holes:
    """The free parts of a range.

    :meth:`add` may be called at any time, from a finalizer in the middle of :meth:`take` or from another thread.  Only
    one thread at a time may take.
    """

    def __init__(self) -> None:
        self._added: list[tuple[int, int]] = []  # (begin, bytes) in any order; add() must touch nothing else
        self._free: list[tuple[int, int]] = []

    def add(self, begin: int, nbytes: int) -> None:
        """Make a part free."""
        self._added.append((begin, nbytes))

    def take(self, nbytes: int) -> int | None:
        """Return the begin of ``nbytes`` that were free until now; None if no free part is large enough."""
        self._join()
        for i, (begin, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[i : i + 1] = [(begin + nbytes, size - nbytes)] if size > nbytes else []
                return begin
        return None

    def _join(self) -> None:
        """Move what was added to the free parts, and join those that touch."""
        if not self._added:
            return
        while self._added:
            self._free.append(self._added.pop())
        joined: list[tuple[int, int]] = []
        for begin, nbytes in sorted(self._free):
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
            else:
                joined.append((begin, nbytes))
        self._free = joined
