"""Transports that pass tables by value, as the argument of a launch: always, or if they fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..tables.layout import HEADER, WORD, Batch, HostTable, Span, Words, batches, table_type
from .ring import MemcpyTransport
from .transport import Argument, Lent, Transport, opaque

#: The most bytes of kernel arguments: before CUDA 12.1, and since (Volta and later, driver 530 and later).
ARGUMENT_BYTES = (4096, 32764)


class StructTransport(Transport):
    """Pass the table by value, as torch does, in as many launches as its size needs.

    Args:
        argument_bytes: bytes per launch, one of ``ARGUMENT_BYTES``.

    Raises:
        ValueError: ``argument_bytes`` is another number.
    """

    name = "struct"

    def __init__(self, device: int, argument_bytes: int = ARGUMENT_BYTES[0]) -> None:
        super().__init__(device)
        if argument_bytes not in ARGUMENT_BYTES:
            raise ValueError(f"argument_bytes is {argument_bytes}; CUDA has the limits {ARGUMENT_BYTES}")
        self.argument_bytes = argument_bytes
        self.words = (argument_bytes - HEADER.itemsize) // WORD
        self.dtype = np.dtype([("header", HEADER), ("words", np.uint64, (self.words,))])
        self._kind = table_type(argument_bytes)
        self._last: _ByValue | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device, self.argument_bytes)

    def kind(self, table: HostTable) -> str:
        return self._kind

    def lend(self, table: HostTable, stream: int) -> Lent:
        last = self._last
        if last is None or last.table is not table:
            last = self._last = _ByValue(table, self._kind, self.words, self.dtype)
        return last

    def fits(self, table: HostTable) -> bool:
        """Return whether the whole table fits one launch."""
        return len(table.words) <= self.words


class _Cut(NamedTuple):
    """The argument of one launch, with views of its scalars and rows; the rows' range in the table; how many chunks."""

    argument: Argument
    scalars: Words
    rows: Words
    first: int
    last: int
    chunks: int


class _ByValue(Lent):
    """A table, cut into arguments that are kept; each gets scalars and rows as they are when it is asked for."""

    def __init__(self, table: HostTable, kind: str, words: int, dtype: np.dtype[np.void]) -> None:
        self.table, self.kind = table, kind
        self._words, self._dtype = words, dtype
        self._cuts: dict[Span | None, list[_Cut]] = {}

    def parts(self, span: Span | None = None) -> Iterator[tuple[Argument, int]]:
        table = self.table
        if (cuts := self._cuts.get(span)) is None:
            cuts = self._cuts[span] = [self._cut(batch) for batch in batches(table, self._words, span)]
        for argument, scalars, rows, first, last, chunks in cuts:
            scalars[:] = table.words[: table.rows_at]
            rows[:] = table.row_words[first:last]
            yield argument, chunks

    def _cut(self, batch: Batch) -> _Cut:
        table = self.table
        argument = np.zeros(1, self._dtype)
        words, chunks = argument["words"][0], table.chunk_words[batch.chunk : batch.chunk_end]
        wide, chunks_at = table.lists + 2, -1
        rows_end = table.rows_at + (batch.row_end - batch.row) * wide
        if table.lists_chunks:
            chunks_at = rows_end
            words[rows_end : rows_end + chunks.size] = (chunks - (batch.row, 0)).reshape(-1).view(np.uint64)
        argument["header"] = (table.rows_at, chunks_at, len(chunks), table.geometry.chunk_numel)
        rows = words[table.rows_at : rows_end].view(np.int64).reshape(-1, wide)
        return _Cut(opaque(argument), words[: table.rows_at], rows, batch.row, batch.row_end, len(chunks))


class HybridTransport(Transport):
    """Pass a table by value if it fits one launch, else in memory, by :class:`MemcpyTransport`."""

    name = "hybrid"

    def __init__(self, device: int, argument_bytes: int = ARGUMENT_BYTES[0]) -> None:
        super().__init__(device)
        self._struct = StructTransport(device, argument_bytes)
        self._memcpy = MemcpyTransport(device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device, self._struct.argument_bytes)

    def _for(self, table: HostTable) -> StructTransport | MemcpyTransport:
        return self._struct if self._struct.fits(table) else self._memcpy

    def kind(self, table: HostTable) -> str:
        return self._for(table).kind(table)

    def prepare(self, table: HostTable) -> None:
        self._for(table).prepare(table)

    def lend(self, table: HostTable, stream: int) -> Lent:
        lent = self._for(table).lend(table, stream)
        self.copied_bytes = self._memcpy.copied_bytes
        return lent
