"""What is free of a range of bytes."""

from __future__ import annotations


class Holes:
    """Stretches that may be taken.

    Whoever had a stretch adds it when its last user goes: at any moment, in the middle of :meth:`take` or in another
    thread.  Only one thread at a time may take.
    """

    def __init__(self) -> None:
        self._added: list[tuple[int, int]] = []  # (begin, bytes), in any order: what add() touches, and nothing else
        self._free: list[tuple[int, int]] = []

    def add(self, begin: int, nbytes: int) -> None:
        """Let a stretch be taken."""
        self._added.append((begin, nbytes))

    def take(self, nbytes: int) -> int | None:
        """Where ``nbytes`` begin that were free until now; None: there are none."""
        self._sort_in()
        for i, (begin, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[i : i + 1] = [(begin + nbytes, size - nbytes)] if size > nbytes else []
                return begin
        return None

    def _sort_in(self) -> None:
        """Join what was added with what it touches."""
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
