"""Tables in memory: a ring of buffers, each guarded by an event, so that a table in flight is never rewritten."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.source import table_type
from ..system.cuda import driver
from ..tables.layout import WORD, HostTable, Span
from .transport import TABLE_AT, Argument, Lent, Transport, opaque

#: Tables in flight before the host waits for the oldest: only a host that is this many steps ahead ever waits.
RING = 4


class HostMemory(Protocol):
    """What a buffer asks of its memory (:class:`~pagedopt.system.cuda.driver.Buffer`)."""

    @property
    def address(self) -> int: ...

    @property
    def host(self) -> npt.NDArray[np.uint8]: ...


class TableBuffer(Lent):
    """Memory for one table, and what it holds now.

    Args:
        memory: where the host writes.
        address: where kernels read.
        event: passed when no launch reads it any more.
        keep: what has to live as long.
    """

    kind = table_type(0)

    def __init__(self, memory: HostMemory, address: int, event: driver.Event, keep: Any = None) -> None:
        self.words = memory.host.view(np.uint64)
        self.source, self.address, self.keep = memory.address, address, keep
        self.table: HostTable | None = None
        self.guarded: int | None = None  # the stream whose launches ``_event`` follows; None: none may be in flight
        self._event = event
        self._lent_to: int | None = None  # the stream that will be; None: a graph owns this buffer for life
        self._fields = np.zeros(1, TABLE_AT)
        self._fields["words"] = address
        self._argument = opaque(self._fields)
        self._stamp = self._rows_stamp = -1

    def holds(self, table: HostTable, stream: int) -> bool:
        """Whether it was lent with this very table to this stream."""
        return self.table is table and self._stamp == table.stamp and self.guarded == stream

    def wait(self) -> None:
        """Until no launch reads it."""
        if self.guarded is not None:
            self._event.wait()
            self.guarded = None

    def is_read(self) -> bool:
        """Whether a launch may still read it; asks without waiting."""
        if self.guarded is not None and self._event.has_passed():
            self.guarded = None
        return self.guarded is not None

    def write(self, table: HostTable) -> int:
        """Bring the words up to date; returns how many words, from the first, may differ from before."""
        if self.table is not table:
            end = len(table.words)
            self._fields["header"] = table.header()[0]
        else:
            end = table.rows_at if self._rows_stamp == table.rows_stamp else table.rows_end
        self.words[:end] = table.words[:end]
        self.table, self._stamp, self._rows_stamp = table, table.stamp, table.rows_stamp
        return end

    def lend(self, stream: int | None) -> TableBuffer:
        """Itself, for launches on ``stream``; None: for those that a graph captures."""
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
        """The block may have failed behind its launch: guard the buffer in any case."""
        if self._lent_to is not None:
            self._event.record(self._lent_to)
            self.guarded = self._lent_to


class RingTransport(Transport):
    """A ring of tables in memory, each guarded by an event: a table in flight is never rewritten."""

    in_memory = True

    def __init__(self, device: int, ring: int = RING) -> None:
        super().__init__(device)
        self._size = ring
        self._buffers: list[TableBuffer] = []
        self._reserve: list[TableBuffer] = []  # for a capture, during which the driver gives no managed memory
        self._captured: list[TableBuffer] = []  # a captured graph owns its table for life
        self._current = 0

    @classmethod
    def probe(cls, device: int) -> None:
        cls(device).allocate(WORD)

    def kind(self, table: HostTable) -> str:
        return TableBuffer.kind

    def prepare(self, table: HostTable) -> None:
        if not any(len(buffer.words) >= len(table.words) for buffer in self._reserve):
            self._reserve = [self._fresh(table)]

    def lend(self, table: HostTable, stream: int) -> TableBuffer:
        if torch.cuda.is_current_stream_capturing():
            buffer = self._reserved(table)
            self.publish(buffer, buffer.write(table), stream)
            self._captured.append(buffer)
            return buffer.lend(None)
        buffer = self._next(table, stream)
        if buffer.guarded is None:
            self.publish(buffer, buffer.write(table), stream)
        return buffer.lend(stream)

    def _reserved(self, table: HostTable) -> TableBuffer:
        for buffer in self._reserve:
            if len(buffer.words) >= len(table.words):
                self._reserve.remove(buffer)
                return buffer
        raise RuntimeError(
            "a CUDA graph is being captured and no table is ready for it: call prepare() before the capture"
        )

    def _next(self, table: HostTable, stream: int) -> TableBuffer:
        """The buffer that holds this very table on this stream, or one that no launch reads any more."""
        if self._buffers and (buffer := self._buffers[self._current]).holds(table, stream):
            return buffer
        if len(self._buffers) < self._size:
            self._buffers.append(self._fresh(table))
            self._current = len(self._buffers) - 1
        else:
            self._current = (self._current + 1) % self._size
        buffer = self._buffers[self._current]
        buffer.wait()
        if len(buffer.words) < len(table.words):
            buffer = self._buffers[self._current] = self._fresh(table)
        return buffer

    def _fresh(self, table: HostTable) -> TableBuffer:
        return self.allocate(max(1, len(table.words)) * WORD)

    def allocate(self, nbytes: int) -> TableBuffer:
        """Memory for a table of so many bytes."""
        raise NotImplementedError

    def publish(self, buffer: TableBuffer, words: int, stream: int) -> None:
        """Make the first ``words`` words visible to work launched on ``stream`` from now on."""


class ManagedTransport(RingTransport):
    """Managed memory, written by the host and read by the kernel in place, with no copy call.

    Without advice the pages migrate to whoever touched them last and a rewrite costs up to a millisecond; preferring
    the host and mapping the pages on the device makes it cost what page-locked memory costs (notes/pointer_transports).
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
        return TableBuffer(memory, memory.address, driver.Event(self.device))


class MappedTransport(RingTransport):
    """Page-locked host memory, read by the kernel in place over the link."""

    name = "mapped"
    over_link = True

    def allocate(self, nbytes: int) -> TableBuffer:
        memory = driver.allocate_mapped(nbytes, self.device)
        return TableBuffer(memory, memory.address, driver.Event(self.device))


class MemcpyTransport(RingTransport):
    """Built in page-locked host memory, copied to the device in stream order, read there."""

    name = "memcpy"

    def allocate(self, nbytes: int) -> TableBuffer:
        memory = driver.allocate_pinned(nbytes, self.device)
        copy = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self.device}")
        return TableBuffer(memory, copy.data_ptr(), driver.Event(self.device), keep=copy)

    def publish(self, buffer: TableBuffer, words: int, stream: int) -> None:
        driver.copy_to_device(buffer.address, buffer.source, words * WORD, stream)
        self.copied_bytes += words * WORD
