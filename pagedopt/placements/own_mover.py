"""How pages visit through a ring that one optimizer has for itself, in a step that goes on from hook to hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..paging.policy import Move
from .movers import Ring, Staged, StagedMover, copies_of

#: By move and direction, the calls that queue its copies on a stream, each with its bytes.
KnownCopies = dict[tuple[Move, bool], list[tuple[Callable[[int], None], int]]]


class OwnMover(StagedMover):
    """Copies pages through a ring that no other optimizer uses.

    So nobody has to take it, and the visits of one step may be queued by two threads, one after the other.

    Args:
        copies: kept by the caller while ring and arenas stay; filled here.
    """

    def __init__(self, ring: Ring, arenas: Sequence[Staged], stream: int, copies: KnownCopies) -> None:
        super().__init__(ring, arenas, stream)
        self._copies = copies

    def begin(self) -> None:
        """As of :class:`StagedMover`."""
        self.fetch_behind_all()

    def finish(self) -> None:
        """As of :class:`StagedMover`."""
        self.wait_for_all()

    def _copy(self, move: Move, stream: int, to_device: bool) -> None:
        if (known := self._copies.get((move, to_device))) is None:
            found = copies_of(self.ring, self.arenas[move.arena], move, to_device)
            known = self._copies[move, to_device] = [(each.prepared(), each.ranges * each.nbytes) for each in found]
        for queue, nbytes in known:
            queue(stream)
            self.ring.copied_bytes[not to_device] += nbytes
