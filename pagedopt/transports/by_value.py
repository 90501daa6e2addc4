"""Tables that travel by value, as the argument of a launch; and those that do where they fit."""

from __future__ import annotations

import numpy as np

from ..kernels.source import table_type
from ..tables.layout import HEADER, WORD, Batch, HostTable, Span, batches
from .ring import MemcpyTransport
from .transport import Argument, Lent, Transport, opaque

#: Bytes of kernel arguments: before CUDA 12.1, and since (Volta and later, driver 530 and later).
ARGUMENT_BYTES = (4096, 32764)


class StructTransport(Transport):
    """As torch does it: the table travels by value, in as many launches as its size asks for.

    Args:
        argument_bytes: what a launch carries, one of ``ARGUMENT_BYTES``.

    Raises:
        ValueError: it is another number.
    """

    name = "struct"

    def __init__(self, device: int, argument_bytes: int = ARGUMENT_BYTES[0]) -> None:
        super().__init__(device)
        if argument_bytes not in ARGUMENT_BYTES:
            raise ValueError(f"argument_bytes is {argument_bytes}; CUDA has the limits {ARGUMENT_BYTES}")
        self.words = (argument_bytes - HEADER.itemsize) // WORD
        self.dtype = np.dtype([("header", HEADER), ("words", np.uint64, (self.words,))])
        self._kind = table_type(argument_bytes)
        self._last: _ByValue | None = None

    def kind(self, table: HostTable) -> str:
        return self._kind

    def lend(self, table: HostTable, stream: int) -> Lent:
        last = self._last
        if last is None or last.table is not table or last.stamp != table.stamp:
            last = self._last = _ByValue(table, self._kind, self.words, self.dtype)
        return last

    def fits(self, table: HostTable) -> bool:
        """Whether the whole table travels in one launch."""
        return len(table.words) <= self.words


class _ByValue(Lent):
    """A table as it is at one stamp, cut into arguments."""

    def __init__(self, table: HostTable, kind: str, words: int, dtype: np.dtype[np.void]) -> None:
        self.table, self.stamp, self.kind = table, table.stamp, kind
        self._words, self._dtype = words, dtype
        self._whole: list[tuple[Argument, int]] | None = None

    def parts(self, span: Span | None = None) -> list[tuple[Argument, int]]:
        if span is not None:
            return self._cut(span)
        if self._whole is None:
            self._whole = self._cut(None)
        return self._whole

    def _cut(self, span: Span | None) -> list[tuple[Argument, int]]:
        return [
            (opaque(self._argument(batch)), batch.chunk_end - batch.chunk)
            for batch in batches(self.table, self._words, span)
        ]

    def _argument(self, batch: Batch) -> Argument:
        table = self.table
        argument = np.zeros(1, self._dtype)
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


class HybridTransport(Transport):
    """Struct when the table fits one launch, memcpy when not (the shape of torch's attempts at long lists)."""

    name = "hybrid"

    def __init__(self, device: int, argument_bytes: int = ARGUMENT_BYTES[0]) -> None:
        super().__init__(device)
        self._struct = StructTransport(device, argument_bytes)
        self._memcpy = MemcpyTransport(device)

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
