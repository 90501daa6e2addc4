"""Buffers that small tables share: without it, each of a thousand optimizers would have a ring of four."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from typing import Any

from ..tables.layout import WORD, HostTable
from .ring import RingTransport, TableBuffer
from .transport import Lent, Transport

#: Bytes of the largest table that is small, of the smallest buffer, and of an allocation that is cut into buffers.
SMALL, MIN_BUFFER, ALLOCATION = 4096, 256, 64 << 10
#: Lent buffers of one size before the oldest are checked for reuse.
AGAIN = 16


class PooledTransport(Transport):
    """The transport ``ring`` for large tables; small ones use buffers that all tables of a device share.

    A buffer is reused once the launch that read it has ended; until then new buffers are made, so the host never waits.
    Do not capture its launches into a CUDA graph.
    """

    name = "pool"
    in_memory = True

    def __init__(self, ring: RingTransport) -> None:
        self._ring = ring
        self.over_link = ring.over_link  # type: ignore[misc] # a class variable elsewhere
        super().__init__(ring.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._ring,)

    def kind(self, table: HostTable) -> str:
        return self._ring.kind(table)

    def prepare(self, table: HostTable) -> None:
        self._ring.prepare(table)

    @property
    def lends_host_memory(self) -> bool:
        return self._ring.lends_host_memory

    @property
    def may_be_copied(self) -> bool:
        return self._ring.may_be_copied

    def borrow(self, table: HostTable, stream: int) -> TableBuffer:
        if table.words.nbytes > SMALL:
            return self._ring.borrow(table, stream)
        return _pool_of(type(self._ring), self.device).take(table.words.nbytes)

    def lend(self, table: HostTable, stream: int) -> Lent:
        if table.words.nbytes > SMALL:
            lent = self._ring.lend(table, stream)
        else:
            buffer = _pool_of(type(self._ring), self.device).take(table.words.nbytes)
            try:
                self._ring.publish(buffer, buffer.write(table), stream)
            except BaseException:
                buffer.give_back()
                raise
            lent = buffer.lend(stream)
        self.copied_bytes = self._ring.copied_bytes
        return lent


class _PooledBuffer(TableBuffer):
    """A buffer that returns to its pool after its launch."""

    lent: deque[_PooledBuffer]
    by: tuple[int, int | None] = (0, None)  # the thread that lent it last, and the stream

    def read_on(self, stream: int) -> None:
        super().read_on(stream)
        self.by = threading.get_ident(), stream
        self.give_back()

    def give_back(self) -> None:
        """Append to the queue, which is ordered by the time of lending."""
        self.lent.append(self)


class _BufferPool:
    """The buffers of one class of transport on one device; safe to use from several threads."""

    def __init__(self, cls: type[RingTransport], device: int) -> None:
        self._ring = cls(device)
        #: By bytes: buffers that no launch reads, and those that have been lent.
        self._sizes: dict[int, tuple[list[_PooledBuffer], deque[_PooledBuffer]]] = {}

    def take(self, nbytes: int) -> _PooledBuffer:
        """Return a buffer of at least ``nbytes`` that no launch reads.

        It prefers recently lent ones: they are in the processor's caches, and may still hold this very table.
        """
        size = max(MIN_BUFFER, 1 << (nbytes - 1).bit_length())
        free, lent = self._sizes.get(size) or self._sizes.setdefault(size, ([], deque()))
        if len(lent) >= AGAIN:
            self._free(free, lent)
        try:
            return free.pop()
        except IndexError:
            return self._more(size, free, lent)

    def _free(self, free: list[_PooledBuffer], lent: deque[_PooledBuffer]) -> None:
        """Look at the eight oldest lent buffers, and move those that no launch reads any more to ``free``."""
        some: list[_PooledBuffer] = []
        with contextlib.suppress(IndexError):  # another thread was faster
            while len(some) < AGAIN // 2:
                some.append(lent.popleft())
        if some and not some[-1].is_read():
            newest = some[-1]  # one thread's launches on one stream end in order: one event answers for all of them
            for buffer in some:
                if buffer.by == newest.by and buffer.guarded == newest.by[1]:
                    buffer.guarded = None
            free += [buffer for buffer in some if not buffer.is_read()]
            some = [buffer for buffer in some if buffer.guarded is not None]
        lent.extendleft(reversed(some))

    def _more(self, size: int, free: list[_PooledBuffer], lent: deque[_PooledBuffer]) -> _PooledBuffer:
        whole = self._ring.allocate(ALLOCATION)
        made = []
        for begin in range(0, ALLOCATION, size):
            words = whole.words[begin // WORD : (begin + size) // WORD]
            buffer = _PooledBuffer(words, whole.address + begin, self._ring.device, keep_alive=whole)
            buffer.lent = lent
            made.append(buffer)
        first, *others = made
        free += others
        return first


@functools.cache
def _pool_of(cls: type[RingTransport], device: int) -> _BufferPool:
    return _BufferPool(cls, device)
