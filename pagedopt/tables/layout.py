"""The words of a pointer table: arithmetic on numbers and arrays, without torch or a device.

A table is one block of 8-byte words in three parts::

    scalars   sets × uniforms   float64   the hyperparameters of each set
    rows      n × (lists + 2)             tensor i: its address in every list, its number of elements, its set
    chunks    c × 2             int64     the work of one warp or block of threads: row, and first element

A row is contiguous, so a thread block fetches all about a tensor at once.  If every tensor is one chunk, as in long
lists of small tensors, chunk i is row i, and the third part is left out.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

WORD = 8
BLOCK = 512  # threads of a block
CHUNK = np.dtype([("row", np.int64), ("offset", np.int64)])
#: What a launch passes besides the words: where rows and chunks begin (in words; -1: no chunks listed), the number of
#: chunks, and elements per chunk.
HEADER = np.dtype([("rows", np.int64), ("chunks", np.int64), ("count", np.int64), ("chunk_numel", np.int64)])

Words = npt.NDArray[np.uint64]
#: A half-open range of chunks: (first, last + 1).
Span = tuple[int, int]


def table_type(argument_bytes: int) -> str:
    """Return the C++ type of a kernel's argument: a table by value in ``argument_bytes``; 0: a table in memory."""
    return f"TableOf<{argument_bytes}>" if argument_bytes else "TableAt"


@functools.cache  # making a dtype is slow, and there may be thousands of tables
def row_dtype(lists: int) -> np.dtype[Any]:
    """Return the dtype of a row of a table over ``lists`` lists."""
    return np.dtype([("address", np.uint64, (lists,)), ("numel", np.int64), ("set", np.int64)])


@dataclass(frozen=True)
class Geometry:
    """How the work is cut: ``threads`` threads (a warp or a block) share a chunk of ``chunk_numel`` elements.

    Raises:
        ValueError: ``chunk_numel`` is no multiple of 16 below 2^30, or ``threads`` neither a warp nor a block.
    """

    chunk_numel: int
    threads: int

    def __post_init__(self) -> None:
        if self.chunk_numel % 16 or not 0 < self.chunk_numel < 2**30:  # so that a chunk is aligned like its tensor
            raise ValueError(f"chunk_numel is {self.chunk_numel}; it must be a multiple of 16 below 2**30")
        if self.threads not in (32, BLOCK):
            raise ValueError(f"threads is {self.threads}; it must be 32 (a warp) or {BLOCK} (a block)")


_WARPS = Geometry(1024, 32)


def choose_geometry(numels: Sequence[int], itemsize: int = 4, over_link: bool = False, per_thread: int = 4) -> Geometry:
    """Return a warp per chunk if no tensor has more than 1,024 elements; else blocks, in chunks that fill a large GPU.

    A chunk of 128 KiB of each list hides the cost of reading the table over the link (notes/fused_step.md).  With fewer
    than a thousand chunks a GPU of 132 multiprocessors would idle, so chunks shrink, down to 2,048 elements.  If every
    chunk reads its part of the table over the link, where an H200 makes 24 to 33 such reads per microsecond, 64 chunks
    are enough (notes/raw/chunks-h200.txt).

    Args:
        numels: elements of each tensor.
        itemsize: bytes of an element of the widest list; more than 4 count as 4.
        over_link: whether a GPU reads the table in host memory.
        per_thread: elements that a thread takes at a time.  With 8, chunks of twice as many elements are 3 % faster.
    """
    largest, total = max(numels, default=0), sum(numels)
    if largest <= 1024:
        return _WARPS
    more = max(4, per_thread) // 4
    chunk = (128 << 10) // max(2, min(itemsize, 4)) * more
    while chunk > 2048 * more and total < (64 if over_link else 1056) * chunk:
        chunk //= 2
    return Geometry(chunk, BLOCK)


def chunks(numels: Sequence[int] | npt.NDArray[np.int64], chunk_numel: int) -> npt.NDArray[Any]:
    """Return all chunks (row, offset) of rows of ``numels`` elements, in order."""
    counts = -(-np.asarray(numels, np.int64) // chunk_numel)
    out = np.empty(int(counts.sum()), CHUNK)
    out["row"] = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    out["offset"] = (np.arange(len(out)) - first[out["row"]]) * chunk_numel
    return out


class HostTable:
    """The words of a table in ordinary memory, with stamps that count changes.

    Transports compare stamps and send only what has changed; CPU kernels walk these words directly.

    Args:
        lists: number of tensor lists.
        numels: elements of each tensor.
        uniforms: float64 hyperparameters per set.
        sets: the most sets of hyperparameters in use at once.
        geometry: how to cut the work (default: :func:`choose_geometry`).

    Attributes:
        words, scalars: all words, uint64, and the hyperparameters in them, (sets, uniforms) float64.
        row_words, chunk_words: rows (addresses, elements, set) and chunks (row, offset) as 2-dimensional int64 arrays.
        lists_chunks: whether ``words`` contain the chunks.
        rows_at, rows_end: indices in ``words`` at which the rows begin and end.
        stamp, rows_stamp: change with scalars or rows, and with rows alone.
        walk: a cache of the CPU kernels (``kernels/cpu.py``).
    """

    __slots__ = (
        "__weakref__", "_bytes", "_first", "_set", "_sizes", "chunk_words", "geometry", "lists", "lists_chunks",
        "row_words", "rows_at", "rows_end", "rows_stamp", "scalars", "stamp", "walk", "words",
    )  # fmt: skip

    def __init__(
        self,
        lists: int,
        numels: Sequence[int] | npt.NDArray[np.int64],
        uniforms: int = 0,
        sets: int = 1,
        geometry: Geometry | None = None,
    ) -> None:
        self.lists = lists
        self._sizes = sizes = np.asarray(numels, np.int64)
        self.geometry = geometry or choose_geometry(sizes.tolist())
        self.rows_at = sets * uniforms
        self.rows_end = self.rows_at + len(sizes) * (lists + 2)
        self.lists_chunks = bool(((sizes < 1) | (sizes > self.geometry.chunk_numel)).any())
        plan = chunks(sizes, self.geometry.chunk_numel).view(np.int64).reshape(-1, 2)
        self.words: Words = np.zeros(self.rows_end + (plan.size if self.lists_chunks else 0), np.uint64)
        self._bytes, self._set = self.words.data.cast("B"), _doubles(uniforms)
        self._first = self._bytes[: self._set.size]
        self.scalars = self.words[: self.rows_at].view(np.float64).reshape(sets, uniforms)
        self.row_words = self.words[self.rows_at : self.rows_end].view(np.int64).reshape(-1, lists + 2)
        self.row_words[:, lists] = sizes
        self.chunk_words = plan
        if self.lists_chunks:
            self.chunk_words = self.words[self.rows_end :].view(np.int64).reshape(-1, 2)
            self.chunk_words[:] = plan
        self.stamp = self.rows_stamp = 0
        self.walk: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have views of words of their own; copied one by one, arrays would no longer share memory."""
        sets, uniforms = self.scalars.shape
        return _table_with, (self.words, self.lists, self._sizes, uniforms, sets, self.geometry)

    def set_scalars(self, values: Sequence[Sequence[float]] | npt.NDArray[np.float64]) -> None:
        """Write the first ``len(values)`` sets of hyperparameters, if they differ.

        Raises:
            TypeError: one is no number, or a set has too few or too many.
        """
        try:
            if isinstance(values, np.ndarray):
                new = values.tobytes()
            else:
                pack = self._set.pack
                new = pack(*values[0]) if len(values) == 1 else b"".join([pack(*each) for each in values])
        except struct.error as error:
            raise TypeError(f"a set has {self._set.size // WORD} hyperparameters: {error}") from None
        cells = self._first if len(new) == len(self._first) else self._bytes[: len(new)]
        if cells.tobytes() != new:  # a memoryview would compare byte by byte
            cells[:] = new
            self.stamp += 1

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The rows as a structured array of :func:`row_dtype`."""
        return self.row_words.reshape(-1).view(row_dtype(self.lists))

    @property
    def chunks(self) -> npt.NDArray[Any]:
        """The chunks as a structured array of ``CHUNK``."""
        return self.chunk_words.reshape(-1).view(CHUNK)

    def set_column(self, j: int, addresses: Words) -> None:
        """Write the address of each row in list ``j``, (rows,) uint64."""
        self.row_words[:, j] = addresses.view(np.int64)
        self.rows_changed()

    def set_sets(self, sets: npt.ArrayLike) -> None:
        """Write the index of each row's set of hyperparameters, (rows,) int64."""
        self.rows["set"] = sets
        self.rows_changed()

    def rows_changed(self) -> None:
        """Call after a write to :attr:`rows`."""
        self.stamp += 1
        self.rows_stamp = self.stamp

    def header(self, first: int = 0, last: int | None = None) -> npt.NDArray[Any]:
        """Return the HEADER of the table, or of its chunks ``first`` to ``last - 1``, (1,)."""
        count = (len(self.chunk_words) if last is None else last) - first
        chunks_at = self.rows_end + 2 * first if self.lists_chunks else -1
        rows_at = self.rows_at if self.lists_chunks else self.rows_at + first * (self.lists + 2)
        return np.array([(rows_at, chunks_at, count, self.geometry.chunk_numel)], HEADER)

    def shares(self, span: Span, count: int, least: int = 1) -> list[Span]:
        """Cut a span into at most ``count`` spans of about equal work, of ``least`` elements or more on average."""
        # Absent tensors count as if present, so that the cut stays valid while gradients come and go.
        first, last = span
        chunks = self.chunks[first:last]
        left = np.minimum(self._sizes[chunks["row"]] - chunks["offset"], self.geometry.chunk_numel)
        count = min(count, int(left.sum()) // least)
        if count <= 1:
            return [span]
        # A chunk costs as much as 64 elements, whatever its size.
        done: npt.NDArray[np.int64] = np.cumsum(left + 64)
        ends = np.searchsorted(done, done[-1] * np.arange(1, count) / count)
        return list(itertools.pairwise(sorted({first, *(ends + (first + 1)).tolist(), last})))

    def chunks_of(self, rows: Sequence[tuple[int, int]]) -> list[Span]:
        """Return the span of the chunks of each range (first, last + 1) of rows."""
        bounds = np.searchsorted(np.ascontiguousarray(self.chunks["row"]), np.asarray(rows, np.int64))
        return [(first, last) for first, last in bounds.tolist()]


@functools.cache
def _doubles(count: int) -> struct.Struct:
    """Return what packs so many doubles, in a quarter of an array's time; cached: all tables of a rule share it."""
    return struct.Struct(f"{count}d")


def _table_with(words: Words, *arguments: Any) -> HostTable:
    """Return a table with these words, which no transport has sent yet."""
    table = HostTable(*arguments)
    table.words[:] = words
    table.rows_changed()
    return table


@dataclass(frozen=True)
class Batch:
    """The rows and chunks of one launch, as half-open ranges."""

    row: int
    row_end: int
    chunk: int
    chunk_end: int


def batches(table: HostTable, words: int, span: Span | None = None) -> Iterator[Batch]:
    """Cut a table, or a span of its chunks, so that all scalars and one batch's rows and chunks fit ``words`` words."""
    row_words, chunk_words = table.lists + 2, 2 if table.lists_chunks else 0
    room = words - table.rows_at
    if room < row_words + chunk_words:
        raise ValueError(
            f"a launch carries {words * WORD} bytes; {table.rows_at} scalars and one row of {table.lists} lists need "
            f"{(table.rows_at + row_words + chunk_words) * WORD}: use another transport or fewer sets of scalars"
        )
    start, stop = span or (0, len(table.chunk_words))
    row = np.ascontiguousarray(table.chunk_words[start:stop, 0])
    cost = (row + 1) * row_words + chunk_words * np.arange(1, len(row) + 1)  # words to the end of chunk i
    first = 0
    while first < len(row):
        spent = int(row[first]) * row_words + chunk_words * first
        end = int(np.searchsorted(cost, spent + room, side="right"))
        yield Batch(int(row[first]), int(row[end - 1]) + 1, start + first, start + end)
        first = end
