"""Small tables of many owners share buffers: else each of a thousand optimizers would have four of its own."""

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
from .ring import RingTransport, TableBuffer
from .transport import Lent, Transport

#: Bytes of the largest table that is small, of the least room for one, and of the memory that is cut up for them.
SMALL, LEAST, CHUNK = 4096, 256, 64 << 10
#: Places that have been lent before the first of them are asked for again.
AGAIN = 16


class PooledTransport(Transport):
    """Another way, whose small tables travel through buffers that all tables of a device share.

    A buffer is used again when the launch that read it has ended; while none has, there are more buffers, so the host
    never waits.  A larger table has buffers of its own.

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
        buffers = _pool_of(type(self._way), self.device)
        buffer = buffers.take(table.words.nbytes)
        try:
            self._way.publish(buffer, buffer.write(table), stream)
        except BaseException:
            buffer.give_back()
            raise
        return buffer.lend(stream)


class _Piece(NamedTuple):
    """A part of a larger memory, as a buffer takes one."""

    address: int
    host: npt.NDArray[np.uint8]


class _PooledBuffer(TableBuffer):
    """A buffer that goes back to its pool behind its launch."""

    lent: deque[_PooledBuffer]
    by: tuple[int, int | None] = (0, None)  # the thread that lent it last, and to which stream

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.by = threading.get_ident(), self.guarded
        self.give_back()

    def give_back(self) -> None:
        """To the end of the queue: what was lent last is read last."""
        self.lent.append(self)


class _BufferPool:
    """The buffers of one way on one device.  Threads may take and give back at the same time.

    A buffer that was lent not long ago is taken again before one that never was: it is in the processor's caches, and
    may still have this very table.  Whether launches have ended is asked for eight buffers at a time.

    Args:
        kind: the way.
        device: index of the CUDA device.
    """

    def __init__(self, kind: type[RingTransport], device: int) -> None:
        self._way = kind(device)
        self._of: dict[
            int, tuple[list[_PooledBuffer], deque[_PooledBuffer]]
        ] = {}  # by bytes: those that no launch reads

    def take(self, nbytes: int) -> _PooledBuffer:
        """A buffer for so many bytes that no launch reads."""
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

    def _free(self, free: list[_PooledBuffer], lent: deque[_PooledBuffer]) -> None:
        """Find half of the buffers free again if no launch reads them any more, most with one question: what a thread
        gave to a stream ends in that order."""
        some: list[_PooledBuffer] = []
        with contextlib.suppress(IndexError):  # another thread was faster
            while len(some) < AGAIN // 2:
                some.append(lent.popleft())
        if some and not some[-1].is_read():
            judge = some[-1]
            for buffer in some:
                if buffer.by == judge.by and buffer.guarded == judge.by[1]:
                    buffer.guarded = None
            free += [buffer for buffer in some if not buffer.is_read()]
            some = [buffer for buffer in some if buffer.guarded is not None]
        lent.extendleft(reversed(some))

    def _more(self, size: int, free: list[_PooledBuffer], lent: deque[_PooledBuffer]) -> _PooledBuffer:
        whole = self._way.allocate(CHUNK)
        host = whole.words.view(np.uint8)
        made = []
        for begin in range(0, CHUNK, size):
            piece = _Piece(whole.source + begin, host[begin : begin + size])
            buffer = _PooledBuffer(piece, whole.address + begin, driver.Event(self._way.device), whole)
            buffer.lent = lent
            made.append(buffer)
        first, *others = made
        free += others
        return first


@functools.cache
def _pool_of(kind: type[RingTransport], device: int) -> _BufferPool:
    return _BufferPool(kind, device)
