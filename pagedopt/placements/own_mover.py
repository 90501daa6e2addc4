"""How pages visit through a ring that one optimizer has for itself, in a step that goes on from hook to hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..paging.policy import Move
from ..system.driver import Call, Calls
from .movers import Ring, Staged, StagedMover, copies_of


class CallsOfVisit(NamedTuple):
    """The calls of one page's visit, and the bytes that are copied in each direction."""

    fetch: Calls
    arrive: Calls
    evict: Calls
    nbytes: int


KnownCalls = dict[Move, CallsOfVisit]


class OwnMover(StagedMover):
    """Copies pages through a ring that no other optimizer uses, by calls that are made once.

    So nobody has to take the ring, and the visits of one step may be queued by two threads, one after the other.

    Args:
        known: kept by the caller while ring, arenas and stream stay; filled here.
    """

    def __init__(self, ring: Ring, arenas: Sequence[Staged], stream: int, known: KnownCalls) -> None:
        super().__init__(ring, arenas, stream)
        self._known = known

    def begin(self) -> None:
        """As of :class:`StagedMover`."""
        self.fetch_behind_all()

    def fetch(self, move: Move) -> None:
        """As of :class:`StagedMover`."""
        calls = self._calls(move)
        calls.fetch()
        self.ring.copied_bytes[0] += calls.nbytes

    def arrive(self, move: Move) -> None:
        """As of :class:`StagedMover`."""
        self._calls(move).arrive()

    def evict(self, move: Move) -> None:
        """As of :class:`StagedMover`."""
        calls = self._calls(move)
        calls.evict()
        self.ring.copied_bytes[1] += calls.nbytes

    def finish(self) -> None:
        """As of :class:`StagedMover`."""
        self.wait_for_all()

    def _calls(self, move: Move) -> CallsOfVisit:
        if (known := self._known.get(move)) is None:
            known = self._known[move] = self._made(move)
        return known

    def _made(self, move: Move) -> CallsOfVisit:
        ring, up, down = self.ring, self.ring.up.cuda_stream, self.ring.down.cuda_stream
        filled, updated, emptied = (int(each[move.slot].handle) for each in (ring.filled, ring.updated, ring.emptied))
        copies = copies_of(ring, self.arenas[move.arena], move, to_device=True)
        fetched = [call for copy in copies for call in copy.calls(up)]
        brought_back = [call for copy in copies for call in copy.back().calls(down)]
        return CallsOfVisit(
            Calls([_wait(up, emptied), *fetched, _record(filled, up)]),
            Calls([_wait(self.stream, filled)]),
            Calls([_record(updated, self.stream), _wait(down, updated), *brought_back, _record(emptied, down)]),
            sum(copy.ranges * copy.nbytes for copy in copies),
        )


def _wait(stream: int, event: int) -> Call:
    return "cuStreamWaitEvent", stream, event, 0


def _record(event: int, stream: int) -> Call:
    return "cuEventRecord", event, stream
