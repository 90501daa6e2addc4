"""Transports for tables in memory: a ring of buffers, each guarded by an event against rewriting in flight."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from ..system import driver, graphs
from ..tables.layout import WORD, HostTable, Span, Words, table_type
from .transport import TABLE_AT, Argument, Lent, Transport, opaque

#: Tables in flight before the host waits for the oldest: a host waits only if it is this many steps ahead.
RING_SIZE = 4


class TableBuffer(Lent):
    """Memory for one table: the host writes ``words``, kernels read at ``address``; both stay alive with it."""

    kind = table_type(0)

    def __init__(self, words: Words, address: int, device: int, keep_alive: Any = None) -> None:
        self.words, self.source, self.address, self._kept = words, words.ctypes.data, address, keep_alive
        self.table: HostTable | None = None
        self._event = driver.Event(device)
        self.guarded: int | None = None  # the stream on which ``_event`` was recorded; None: no launch is in flight
        self._lent_to: int | None = None  # the stream to record it on; None: a captured graph owns this buffer
        self._fields = np.zeros(1, TABLE_AT)
        self._fields["words"] = address
        self._argument = opaque(self._fields)
        #: Address of the argument for a launch over all chunks, and the driver's event that guards it.
        self.argument, self.event = int(self._argument.ctypes.data), int(self._event.handle)
        self._stamp = self._rows_stamp = -1

    def holds(self, table: HostTable, stream: int) -> bool:
        """Return whether it holds this table, unchanged, and was last lent to this stream."""
        return self.table is table and self._stamp == table.stamp and self.guarded == stream

    def wait(self) -> None:
        """Wait until no launch reads the buffer."""
        if self.guarded is not None:
            self._event.wait()
            self.guarded = None

    def write(self, table: HostTable) -> int:
        """Copy the table's changed words; return how many words, from the first, may have changed."""
        end = self.stale(table)
        self.words[:end] = table.words[:end]
        self.written(table)
        return end

    def stale(self, table: HostTable) -> int:
        """Get ready to hold this table; return how many words, from the first, have to be copied."""
        if self.table is not table:
            self.table, self._rows_stamp = None, -1
            self._fields["header"] = table.header()[0]
            return len(table.words)
        return table.rows_at if self._rows_stamp == table.rows_stamp else table.rows_end

    def written(self, table: HostTable) -> None:
        """Note that it holds the table as it is now."""
        self.table, self._stamp, self._rows_stamp = table, table.stamp, table.rows_stamp

    def lend(self, stream: int | None) -> TableBuffer:
        """Return itself, for launches on ``stream``; None: for launches that a graph captures."""
        self._lent_to = stream
        return self

    def parts(self, span: Span | None = None) -> tuple[tuple[Argument, int], ...]:
        assert self.table is not None, "no table was written here"
        if span is None:
            count = len(self.table.chunk_words)
            return ((self._argument, count),) if count else ()
        first, last = span
        if first == last:
            return ()
        fields = self._fields.copy()
        fields["header"] = self.table.header(first, last)[0]
        return ((opaque(fields), last - first),)

    def __exit__(self, *_: object) -> None:
        """Record the event, even after an error: the block may have failed after its launch."""
        if self._lent_to is not None:
            self._event.record(self._lent_to)
            self.guarded = self._lent_to


class RingTransport(Transport):
    """A ring of buffers, each guarded by an event: a table in flight is never rewritten."""

    in_memory = True

    def __init__(self, device: int, ring: int = RING_SIZE) -> None:
        super().__init__(device)
        self._size = ring
        self._buffers: list[TableBuffer] = []
        self._reserve: list[TableBuffer] = []  # for captures, during which managed memory cannot be allocated
        self._current = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device, self._size)

    @classmethod
    def probe(cls, device: int) -> None:
        cls(device).allocate(WORD)

    def kind(self, table: HostTable) -> str:
        return TableBuffer.kind

    def prepare(self, table: HostTable) -> None:
        if self._find_reserved(table) is None:
            self._reserve = [self._fresh(table)]

    def _find_reserved(self, table: HostTable) -> TableBuffer | None:
        return next((buffer for buffer in self._reserve if len(buffer.words) >= len(table.words)), None)

    def lend(self, table: HostTable, stream: int) -> TableBuffer:
        if torch.cuda.is_current_stream_capturing():
            if (reserved := self._find_reserved(table)) is None:
                raise RuntimeError(
                    "a CUDA graph is being captured and no table is ready for it: call prepare() before the capture"
                )
            self._reserve.remove(reserved)
            self.publish(reserved, reserved.write(table), stream)
            graphs.keep_with_graph(stream, reserved)
            return reserved.lend(None)
        buffer = self._next(table, stream)
        if buffer.guarded is None:
            self.publish(buffer, buffer.write(table), stream)
        return buffer.lend(stream)

    @property
    def lends_host_memory(self) -> bool:
        own = type(self).lend is RingTransport.lend and type(self).publish is RingTransport.publish
        return self.over_link and own  # a subclass may have to do something for a table to reach the device

    @property
    def may_be_copied(self) -> bool:
        return type(self).lend is RingTransport.lend

    def borrow(self, table: HostTable, stream: int) -> TableBuffer:
        return self._next(table, stream)

    def _next(self, table: HostTable, stream: int) -> TableBuffer:
        """Return the buffer that already holds this table for this stream, or one that no launch reads."""
        if self._buffers and (buffer := self._buffers[self._current]).holds(table, stream):
            return buffer
        following = (self._current + 1) % self._size
        if following == len(self._buffers):
            self._buffers.append(self._fresh(table))
        self._current = following
        buffer = self._buffers[self._current]
        buffer.wait()
        if len(buffer.words) < len(table.words):
            buffer = self._buffers[self._current] = self._fresh(table)
        return buffer

    def _fresh(self, table: HostTable) -> TableBuffer:
        return self.allocate(max(1, len(table.words)) * WORD)

    def allocate(self, nbytes: int) -> TableBuffer:
        """Allocate a buffer of ``nbytes``."""
        raise NotImplementedError

    def publish(self, buffer: TableBuffer, words: int, stream: int) -> None:
        """Make the first ``words`` words visible to later work on ``stream``."""


class ManagedTransport(RingTransport):
    """Managed memory, written by the host and read by kernels in place, with no copy call.

    Without advice pages migrate to the side that touched them last, and a rewrite costs up to a millisecond.  With the
    host preferred and the pages mapped on the device it costs as much as with page-locked memory
    (notes/pointer_transports).
    """

    name = "managed"
    over_link = True
    advice: ClassVar[tuple[tuple[driver.Advice, driver.Location], ...]] = (
        (driver.Advice.PREFERRED, driver.Location.HOST),
        (driver.Advice.ACCESSED_BY, driver.Location.DEVICE),
    )

    def allocate(self, nbytes: int) -> TableBuffer:
        memory = driver.allocate_managed(nbytes, self.device)
        for advice, where in self.advice:
            driver.advise(memory.address, memory.nbytes, advice, where, self.device)
        return TableBuffer(memory.host.view(np.uint64), memory.address, self.device)


class MappedTransport(RingTransport):
    """Page-locked host memory, read by kernels in place over the link."""

    name = "mapped"
    over_link = True

    def allocate(self, nbytes: int) -> TableBuffer:
        memory = driver.allocate_mapped(nbytes, self.device)
        return TableBuffer(memory.host.view(np.uint64), memory.address, self.device)


class MemcpyTransport(RingTransport):
    """Page-locked host memory, copied to the device in stream order and read there."""

    name = "memcpy"

    def allocate(self, nbytes: int) -> TableBuffer:
        words = driver.allocate_pinned(nbytes, self.device).host.view(np.uint64)
        # Not torch's memory: that belongs to one stream, and a buffer is lent to any.
        copy = driver.DeviceMemory(nbytes, self.device)
        return TableBuffer(words, copy.address, self.device, keep_alive=copy)

    def publish(self, buffer: TableBuffer, words: int, stream: int) -> None:
        driver.copy_to_device(buffer.address, buffer.source, words * WORD, stream)
        self.copied_bytes += words * WORD
