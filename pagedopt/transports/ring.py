"""How a pointer table reaches a kernel: one class per way, all with the same members.

``run(table, stream, launch)`` makes the words of a host table readable for the device, calls ``launch(argument,
chunks)`` once or more, and guards what the device still reads from being written again.  With ``spans`` it launches
them one by one; whoever makes them may give work to the stream in between.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..system import driver
from ..tables.layout import HEADER, WORD, HostTable, Span, batches

#: Bytes of kernel arguments: before CUDA 12.1, and since (Volta and later, driver 530 and later).
ARGUMENT_BYTES = (4096, 32764)
#: Tables in flight before the host waits for the oldest: only a host that is this many steps ahead ever waits.
RING = 4

#: Takes the kernel's one argument (a NumPy array of size one, passed by value) and the number of chunks in it.
Launch = Callable[[npt.NDArray[Any], int], None]
#: The argument that stands for a table in memory: its address and its header.
TABLE_AT = np.dtype([("words", np.uint64), ("header", HEADER)])


def opaque(fields: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory as bytes without fields, which CuPy would walk at every launch."""
    return fields.view(np.dtype((np.void, fields.itemsize)))


class Transport:
    """Common members: ``name``; ``argument_bytes``, 0 unless the table travels by value; counters of explicit copies.

    Args:
        device: index of the CUDA device.
    """

    name: ClassVar[str]

    def __init__(self, device: int) -> None:
        self.device = device
        self.argument_bytes = 0
        self.copied_bytes = 0  # by explicit copy calls, all runs together
        self.launches = 0

    def run(self, table: HostTable, stream: int, launch: Launch, spans: Iterable[Span] | None = None) -> None:
        """Hand ``table`` over and launch, in order, on ``stream`` (a handle): all chunks, or each of ``spans``."""
        raise NotImplementedError

    def probe(self) -> None:
        """Nothing to try by default."""

    def prepare(self, table: HostTable) -> None:
        """Nothing to make ready by default: what travels by value is frozen into a graph."""

    def _launch(self, launch: Launch, argument: npt.NDArray[Any], count: int) -> None:
        if count:
            launch(argument, count)
            self.launches += 1


class _Slot:
    """One place for a table, and what it holds now."""

    def __init__(self, buffer: driver.Buffer, device_address: int, event: driver.Event, keep: Any = None) -> None:
        self.words = buffer.host.view(np.uint64)
        self.source = buffer.address
        self.event = event
        self.keep = keep
        self.fields = np.zeros(1, TABLE_AT)
        self.fields["words"] = device_address
        self.argument = opaque(self.fields)
        self.stamp = self.rows_stamp = -1
        self.table: HostTable | None = None
        self.stream: int | None = None  # the one whose launches ``event`` guards; None when none may be in flight

    def part(self, table: HostTable, first: int, last: int) -> npt.NDArray[Any]:
        """The argument that stands for some chunks of the table."""
        fields = self.fields.copy()
        fields["header"] = table.header(first, last)[0]
        return opaque(fields)


class RingTransport(Transport):
    """A ring of tables in memory, each guarded by an event: a table in flight is never rewritten."""

    def __init__(self, device: int, ring: int = RING) -> None:
        super().__init__(device)
        self._size = ring
        self._slots: list[_Slot] = []
        self._reserve: list[_Slot] = []  # for a capture, during which the driver gives no managed memory
        self._captured: list[_Slot] = []  # a captured graph owns its table for life
        self._current = 0

    def run(self, table: HostTable, stream: int, launch: Launch, spans: Iterable[Span] | None = None) -> None:
        with self.lend(table, stream) as slot:
            if spans is None:
                self._launch(launch, slot.argument, len(table.chunks))
                return
            for first, last in spans:
                self._launch(launch, slot.part(table, first, last), last - first)

    @contextlib.contextmanager
    def lend(self, table: HostTable, stream: int) -> Iterator[_Slot]:
        """A place that holds ``table``, for kernels launched on ``stream`` inside the block; guarded when it ends."""
        capturing = torch.cuda.is_current_stream_capturing()
        slot = self._reserved(table) if capturing else self._next(table, stream)
        if slot.stream is None:
            self._publish(slot, self._write(slot, table), stream)
        try:
            yield slot
        finally:  # the block may have failed behind its launch
            if capturing:
                self._captured.append(slot)
            else:
                slot.event.record(stream)
                slot.stream = stream

    def prepare(self, table: HostTable) -> None:
        """Have a place ready for ``table`` in case the next run is captured into a CUDA graph."""
        if not any(len(slot.words) >= len(table.words) for slot in self._reserve):
            self._reserve = [self._fresh(table)]

    def _reserved(self, table: HostTable) -> _Slot:
        for slot in self._reserve:
            if len(slot.words) >= len(table.words):
                self._reserve.remove(slot)
                return slot
        raise RuntimeError(
            "a CUDA graph is being captured and no table is ready for it: call prepare() before the capture"
        )

    def _next(self, table: HostTable, stream: int) -> _Slot:
        """The slot that holds this very table on this stream, or one that no launch reads any more."""
        if self._slots:
            slot = self._slots[self._current]
            if slot.table is table and slot.stamp == table.stamp and slot.stream == stream:
                return slot
        if len(self._slots) < self._size:
            self._slots.append(self._fresh(table))
            self._current = len(self._slots) - 1
        else:
            self._current = (self._current + 1) % self._size
        slot = self._slots[self._current]
        if slot.stream is not None:
            slot.event.wait()
            slot.stream = None
        if len(slot.words) < len(table.words):
            slot = self._slots[self._current] = self._fresh(table)
        return slot

    @staticmethod
    def _write(slot: _Slot, table: HostTable) -> int:
        """Bring the slot's words up to date; returns how many words, from the first, may differ from before."""
        if slot.table is not table:
            end = len(table.words)
            slot.fields["header"] = table.header()[0]
        else:
            end = table.rows_at if slot.rows_stamp == table.rows_stamp else table.rows_end
        slot.words[:end] = table.words[:end]
        slot.table, slot.stamp, slot.rows_stamp = table, table.stamp, table.rows_stamp
        return end

    def _fresh(self, table: HostTable) -> _Slot:
        return self._allocate(max(1, len(table.words)) * WORD)

    def probe(self) -> None:
        """Allocate the smallest slot and drop it.

        Raises:
            CudaError: the driver refuses this kind of memory here.
        """
        self._allocate(WORD)

    def _allocate(self, nbytes: int) -> _Slot:
        raise NotImplementedError

    def _publish(self, slot: _Slot, words: int, stream: int) -> None:
        """Make the first ``words`` words visible to work launched on ``stream`` from now on."""


class ManagedTransport(RingTransport):
    """Managed memory, written by the host and read by the kernel in place, with no copy call.

    Without advice the pages migrate to whoever touched them last and a rewrite costs up to a millisecond; preferring
    the host and mapping the pages on the device makes it cost what page-locked memory costs (notes/pointer_transports).
    """

    name = "managed"
    advice: ClassVar[tuple[tuple[driver.Advice, driver.Location], ...]] = (
        (driver.Advice.PREFERRED, driver.Location.HOST),
        (driver.Advice.ACCESSED_BY, driver.Location.DEVICE),
    )

    def _allocate(self, nbytes: int) -> _Slot:
        buffer = driver.allocate_managed(nbytes, self.device)
        for advice, where in self.advice:
            driver.advise(buffer.address, buffer.nbytes, advice, where, self.device)
        return _Slot(buffer, buffer.address, driver.Event(self.device))


class MappedTransport(RingTransport):
    """Page-locked host memory, read by the kernel in place over the link."""

    name = "mapped"

    def _allocate(self, nbytes: int) -> _Slot:
        buffer = driver.allocate_mapped(nbytes, self.device)
        return _Slot(buffer, buffer.address, driver.Event(self.device))


class MemcpyTransport(RingTransport):
    """The rival: build in page-locked host memory, copy to the device in stream order, read there."""

    name = "memcpy"

    def _allocate(self, nbytes: int) -> _Slot:
        buffer = driver.allocate_pinned(nbytes, self.device)
        copy = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self.device}")
        return _Slot(buffer, copy.data_ptr(), driver.Event(self.device), keep=copy)

    def _publish(self, slot: _Slot, words: int, stream: int) -> None:
        driver.copy_to_device(int(slot.fields["words"][0]), slot.source, words * WORD, stream)
        self.copied_bytes += words * WORD


class StructTransport(Transport):
    """The rival that torch uses: the table travels by value, in as many launches as its size asks for."""

    name = "struct"

    def __init__(self, device: int, argument_bytes: int = ARGUMENT_BYTES[0]) -> None:
        super().__init__(device)
        if argument_bytes not in ARGUMENT_BYTES:
            raise ValueError(f"argument_bytes is {argument_bytes}; CUDA has the limits {ARGUMENT_BYTES}")
        self.argument_bytes = argument_bytes
        self.words = (argument_bytes - HEADER.itemsize) // WORD
        self.dtype = np.dtype([("header", HEADER), ("words", np.uint64, (self.words,))])
        self._table: HostTable | None = None
        self._stamp = -1
        self._arguments: list[tuple[npt.NDArray[Any], int]] = []

    def run(self, table: HostTable, stream: int, launch: Launch, spans: Iterable[Span] | None = None) -> None:
        if spans is None and (self._table is not table or self._stamp != table.stamp):
            self._arguments = self._cut(table, None)
            self._table, self._stamp = table, table.stamp
        for arguments in [self._arguments] if spans is None else (self._cut(table, span) for span in spans):
            for argument, count in arguments:
                self._launch(launch, argument, count)

    def _cut(self, table: HostTable, span: Span | None) -> list[tuple[npt.NDArray[Any], int]]:
        """Arguments, and the number of chunks in each."""
        return [
            (opaque(self._argument(table, batch)), batch.chunk_end - batch.chunk)
            for batch in batches(table, self.words, span)
        ]

    def _argument(self, table: HostTable, batch: Any) -> npt.NDArray[Any]:
        argument = np.zeros(1, self.dtype)
        words = argument["words"][0]
        row_words = table.rows.itemsize // WORD
        rows_end = table.rows_at + (batch.row_end - batch.row) * row_words
        count = batch.chunk_end - batch.chunk
        words[: table.rows_at] = table.words[: table.rows_at]
        words[table.rows_at : rows_end] = table.rows[batch.row : batch.row_end].view(np.uint64)
        if table.lists_chunks:
            words[rows_end : rows_end + 2 * count] = table.chunks[batch.chunk : batch.chunk_end].view(np.uint64)
            words[rows_end : rows_end + 2 * count : 2] -= np.uint64(batch.row)
        chunks_at = rows_end if table.lists_chunks else -1
        argument["header"] = (table.rows_at, chunks_at, count, table.geometry.chunk_numel)
        return argument

    def fits(self, table: HostTable) -> bool:
        """Whether the whole table travels in one launch."""
        return len(table.words) <= self.words


class HybridTransport(Transport):
    """Struct when the table fits one launch, memcpy when not (the shape of torch's attempts at long lists)."""

    name = "hybrid"

    def __init__(self, device: int, argument_bytes: int = ARGUMENT_BYTES[0]) -> None:
        super().__init__(device)
        self._struct = StructTransport(device, argument_bytes)
        self._memcpy = MemcpyTransport(device)

    def prepare(self, table: HostTable) -> None:
        way = self._way(table)
        self.argument_bytes = way.argument_bytes
        way.prepare(table)

    def _way(self, table: HostTable) -> StructTransport | MemcpyTransport:
        return self._struct if self._struct.fits(table) else self._memcpy

    def run(self, table: HostTable, stream: int, launch: Launch, spans: Iterable[Span] | None = None) -> None:
        way = self._way(table)
        self.argument_bytes = way.argument_bytes
        way.run(table, stream, launch, spans)
        self.copied_bytes = self._memcpy.copied_bytes
        self.launches = self._struct.launches + self._memcpy.launches


TRANSPORTS: dict[str, type[Transport]] = {
    t.name: t for t in (ManagedTransport, MemcpyTransport, StructTransport, HybridTransport, MappedTransport)
}


def choose(name: str, capabilities: driver.Capabilities) -> tuple[str, str]:
    """Policy: the transport to use for ``name`` on a device with ``capabilities``, and why it differs ("" if not).

    A managed table needs concurrent access: without it the host may not touch managed memory while any kernel runs.
    """
    reason = ""
    if name == "managed" and not (capabilities.managed and capabilities.concurrent_managed):
        name, reason = "mapped", "it has no concurrent managed access (concurrentManagedAccess = 0)"
    if name == "mapped" and not capabilities.mapped:
        name, reason = "memcpy", reason or "it cannot map host memory (canMapHostMemory = 0)"
    return name, reason


def create(name: str, device: int) -> Transport:
    """The transport ``name`` for CUDA device ``device``, or the nearest that works there, with one warning.

    Raises:
        ValueError: there is no transport of that name.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; there are {', '.join(sorted(TRANSPORTS))}")
    chosen, reason = choose(name, driver.capabilities(device))
    for fallback in {"managed": ("mapped", "memcpy"), "mapped": ("memcpy",)}.get(chosen, ()):
        try:
            TRANSPORTS[chosen](device).probe()
            break
        except driver.CudaError as error:
            chosen, reason = fallback, str(error)
    if reason:
        _warn_once(device, name, chosen, reason)
    return TRANSPORTS[chosen](device)


_warned: set[tuple[int, str, str]] = set()


def _warn_once(device: int, name: str, chosen: str, reason: str) -> None:
    if (device, name, chosen) not in _warned:
        _warned.add((device, name, chosen))
        warnings.warn(
            f"cuda:{device} cannot use {name!r} pointer tables: {reason}. Using {chosen!r}; results are the same",
            RuntimeWarning,
            stacklevel=3,
        )
