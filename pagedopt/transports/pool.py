"""Small tables of many owners in memory that they share: else each of a thousand optimizers would have four buffers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..system.cuda import driver
from ..tables.layout import HostTable
from .ring import Place, RingTransport
from .transport import Lent, Transport

#: Bytes of the largest table that is small, of the least room for one, and of the memory that is cut up for them.
SMALL, LEAST, CHUNK = 4096, 256, 64 << 10
#: Places that have been lent before the first of them are asked for again.
AGAIN = 16


class PooledTransport(Transport):
    """Another way, whose small tables travel through places that all tables of a device share.

    A place is used again when the launch that read it has ended; while none has, there are more places, so the host
    never waits.  A larger table has places of its own.

    Args:
        way: what carries the tables; its memory is not captured into a graph through this one.
    """

    name = "pool"
    in_memory = True

    def __init__(self, way: RingTransport) -> None:
        self._way = way
        self.over_link = way.over_link  # type: ignore[misc] # the way's
        super().__init__(way.device)

    @property
    def copied_bytes(self) -> int:
        """The way's."""
        return self._way.copied_bytes

    @copied_bytes.setter
    def copied_bytes(self, value: int) -> None:
        self._way.copied_bytes = value

    def kind(self, table: HostTable) -> str:
        return self._way.kind(table)

    def prepare(self, table: HostTable) -> None:
        self._way.prepare(table)

    def lend(self, table: HostTable, stream: int) -> Lent:
        if table.words.nbytes > SMALL:
            return self._way.lend(table, stream)
        places = _places(type(self._way), self.device)
        place = places.take(table.words.nbytes)
        try:
            self._way.publish(place, place.write(table), stream)
        except BaseException:
            place.give_back()
            raise
        return place.lend(stream)


class _Piece(NamedTuple):
    """A part of a buffer, as a place takes one."""

    address: int
    host: npt.NDArray[np.uint8]


class _Shared(Place):
    """A place that goes back to its pool behind its launch."""

    lent: deque[_Shared]
    by: tuple[int, int | None] = (0, None)  # the thread that lent it last, and to which stream

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.by = threading.get_ident(), self.guarded
        self.give_back()

    def give_back(self) -> None:
        """To the end of the queue: what was lent last is read last."""
        self.lent.append(self)


class _Places:
    """The places of one way on one device.  Threads may take and give back at the same time.

    A place that was lent not long ago is taken again before one that never was: it is in the processor's caches, and
    may still have this very table.  Whether launches have ended is asked for eight places at a time.

    Args:
        kind: the way.
        device: index of the CUDA device.
    """

    def __init__(self, kind: type[RingTransport], device: int) -> None:
        self._way = kind(device)
        self._of: dict[int, tuple[list[_Shared], deque[_Shared]]] = {}  # by bytes: those that no launch reads

    def take(self, nbytes: int) -> _Shared:
        """A place for so many bytes that no launch reads."""
        size = max(LEAST, 1 << (nbytes - 1).bit_length())
        if (found := self._of.get(size)) is None:
            found = self._of.setdefault(size, ([], deque()))
        free, lent = found
        if len(lent) >= AGAIN:
            self._free(free, lent)
        try:
            return free.pop()
        except IndexError:
            return self._more(size, free, lent)

    def _free(self, free: list[_Shared], lent: deque[_Shared]) -> None:
        """Find half of the places free again if no launch reads them any more, most with one question: what a thread
        gave to a stream ends in that order."""
        some: list[_Shared] = []
        with contextlib.suppress(IndexError):  # another thread was faster
            while len(some) < AGAIN // 2:
                some.append(lent.popleft())
        if some and not some[-1].is_read():
            judge = some[-1]
            for place in some:
                if place.by == judge.by and place.guarded == judge.by[1]:
                    place.guarded = None
            free += [place for place in some if not place.is_read()]
            some = [place for place in some if place.guarded is not None]
        lent.extendleft(reversed(some))

    def _more(self, size: int, free: list[_Shared], lent: deque[_Shared]) -> _Shared:
        whole = self._way.allocate(CHUNK)
        host = whole.words.view(np.uint8)
        made = []
        for begin in range(0, CHUNK, size):
            piece = _Piece(whole.source + begin, host[begin : begin + size])
            place = _Shared(piece, whole.address + begin, driver.Event(self._way.device), whole)
            place.lent = lent
            made.append(place)
        first, *others = made
        free += others
        return first


@functools.cache
def _places(kind: type[RingTransport], device: int) -> _Places:
    return _Places(kind, device)
