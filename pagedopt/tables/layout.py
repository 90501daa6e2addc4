"""The layout of a pointer table: arithmetic on plain values, no device and no torch.

A table is one block of 8-byte words in three parts::

    scalars   sets × uniforms   float64   the hyperparameters of each set
    rows      n × (lists + 2)             the addresses of tensor i in every list, its number of elements, its set
    chunks    c × 2             int64     which row, and from which element on: the work of one group of threads

The rows are contiguous, so a thread block fetches all it needs to know of a tensor in one go.  Where every tensor is
one chunk, as in long lists of small tensors, chunk i is row i and the third part is left out.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

WORD = 8
BLOCK = 512  # threads of a block
CHUNK = np.dtype([("row", np.int64), ("offset", np.int64)])
#: What a launch passes besides the words: where the parts begin (in words; no chunks: -1), how many chunks, elements
#: per chunk.
HEADER = np.dtype([("rows", np.int64), ("chunks", np.int64), ("count", np.int64), ("chunk_numel", np.int64)])

Words = npt.NDArray[np.uint64]
#: Chunks from the first to before the second.
Span = tuple[int, int]


@functools.cache  # there may be thousands of tables
def row_dtype(lists: int) -> np.dtype[Any]:
    """One row of a table over ``lists`` lists."""
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
        if self.chunk_numel % 16 or not 0 < self.chunk_numel < 2**30:  # a chunk begins as aligned as its tensor
            raise ValueError(f"chunk_numel is {self.chunk_numel}; it must be a multiple of 16 below 2**30")
        if self.threads not in (32, BLOCK):
            raise ValueError(f"threads is {self.threads}; it must be 32 (a warp) or {BLOCK} (a block)")


_WARPS = Geometry(1024, 32)


def choose_geometry(numels: Sequence[int], itemsize: int = 4, over_link: bool = False) -> Geometry:
    """Small tensors get a warp each; otherwise blocks, with chunks small enough to fill a large GPU.

    128 KiB of each list hide the cost of reading a table over the link (notes/fused_step.md).  Below a thousand chunks
    a GPU of 132 multiprocessors would idle, so they shrink down to 2,048 elements.  Where every chunk reads its part of
    the table over the link, of which an H200 does 24 to 33 in a microsecond, 64 are enough (notes/raw/chunks-h200.txt).

    Args:
        numels: elements of each tensor.
        itemsize: bytes of an element of the widest list; more than 4 count as 4.
        over_link: whether a GPU reads the table in host memory.
    """
    largest, total = max(numels, default=0), sum(numels)
    if largest <= 1024:
        return _WARPS
    chunk = (128 << 10) // max(2, min(itemsize, 4))
    while chunk > 2048 and total < (64 if over_link else 1056) * chunk:
        chunk //= 2
    return Geometry(chunk, BLOCK)


def chunks(numels: Sequence[int] | npt.NDArray[np.int64], chunk_numel: int) -> npt.NDArray[Any]:
    """Every (row, offset) with ``offset`` a multiple of ``chunk_numel`` below the row's number of elements."""
    sizes = np.asarray(numels, dtype=np.int64)
    counts = -(-sizes // chunk_numel)
    out = np.empty(int(counts.sum()), CHUNK)
    out["row"] = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    out["offset"] = (np.arange(len(out), dtype=np.int64) - np.repeat(first, counts)) * chunk_numel
    return out


def _in_words(plan: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return plan.view(np.int64).reshape(-1, 2)


class HostTable:
    """The words of a table in ordinary memory, and a stamp for each part that says when it last changed.

    Transports compare stamps to send only what changed; the CPU kernels walk these very words.

    Args:
        lists: number of tensor lists.
        numels: elements of each tensor.
        uniforms: float64 hyperparameters per set.
        sets: number of different sets of hyperparameters there may be at once.
        geometry: how to cut the work (default: :func:`choose_geometry`).

    Attributes:
        row_words: the rows as kernels on the CPU walk them, (rows, lists + 2): addresses, elements, set.
        chunk_words: and the chunks, (chunks, 2): row, offset.
        walk: what the kernels on the CPU have worked out for it; None: nothing yet.
    """

    __slots__ = (
        "__weakref__", "_sizes", "chunk_words", "geometry", "lists", "lists_chunks", "row_words", "rows_at",
        "rows_end", "rows_stamp", "scalars", "stamp", "walk", "words",
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
        plan = _in_words(chunks(sizes, self.geometry.chunk_numel))
        self.words: Words = np.zeros(self.rows_end + (2 * len(plan) if self.lists_chunks else 0), np.uint64)
        self.scalars = self.words[: self.rows_at].view(np.float64).reshape(sets, uniforms)
        self.row_words = self.words[self.rows_at : self.rows_end].view(np.int64).reshape(-1, lists + 2)
        self.row_words[:, lists] = sizes
        self.chunk_words = plan
        if self.lists_chunks:
            self.chunk_words = self.words[self.rows_end :].view(np.int64).reshape(-1, 2)
            self.chunk_words[:] = plan
        self.stamp = 0  # of scalars or rows, whichever changed last
        self.rows_stamp = 0
        self.walk: Any = None

    def set_scalars(self, values: Sequence[Sequence[float]] | npt.NDArray[np.float64]) -> None:
        """Write the hyperparameter sets (first ``len(values)`` of them) where they differ."""
        if isinstance(values, np.ndarray):
            new = values.tobytes()
        else:
            new = array("d", itertools.chain.from_iterable(values)).tobytes()  # in a third of np.array's time
        there = self.words.data.cast("B")[: len(new)]
        if there != new:
            there[:] = new
            self.stamp += 1

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The rows, of :func:`row_dtype`."""
        return self.row_words.reshape(-1).view(row_dtype(self.lists))

    @property
    def chunks(self) -> npt.NDArray[Any]:
        """The chunks, of ``CHUNK``."""
        return self.chunk_words.reshape(-1).view(CHUNK)

    @property
    def addresses(self) -> Words:
        """Where each row lies in every list, (rows, lists); to read."""
        addresses: Words = self.rows["address"]
        return addresses

    def set_addresses(self, addresses: npt.ArrayLike) -> None:
        """Say where each row lies in every list, (rows, lists) uint64."""
        self.rows["address"] = addresses
        self.rows_changed()

    def set_column(self, j: int, addresses: Words) -> None:
        """Say where each row lies in list ``j``, (rows,)."""
        self.row_words[:, j] = addresses.view(np.int64)
        self.rows_changed()

    def set_sets(self, sets: npt.ArrayLike) -> None:
        """Say which set of hyperparameters each row takes, (rows,) int64."""
        self.rows["set"] = sets
        self.rows_changed()

    def rows_changed(self) -> None:
        """Call after a write to :attr:`rows`."""
        self.stamp += 1
        self.rows_stamp = self.stamp

    def header(self, first: int = 0, last: int | None = None) -> npt.NDArray[Any]:
        """The HEADER of the table, or of its chunks ``first`` … ``last - 1`` alone."""
        count = (len(self.chunk_words) if last is None else last) - first
        chunks_at = self.rows_end + 2 * first if self.lists_chunks else -1
        rows_at = self.rows_at if self.lists_chunks else self.rows_at + first * (self.lists + 2)
        return np.array([(rows_at, chunks_at, count, self.geometry.chunk_numel)], HEADER)

    def shares(self, span: Span, count: int, least: int = 1) -> list[Span]:
        """A span of the chunks in ``count`` or fewer stretches of about equal work: elements, and a little per chunk.

        There are no more than leave each ``least`` elements.  Rows count as if no tensor were absent, so what was cut
        once is right for as long as the table lives.
        """
        first, last = span
        chunks = self.chunks[first:last]
        left = np.minimum(self._sizes[chunks["row"]] - chunks["offset"], self.geometry.chunk_numel)
        count = min(count, int(left.sum()) // least)
        if count <= 1:
            return [span]
        done: npt.NDArray[np.int64] = np.cumsum(left + 64)
        ends = np.searchsorted(done, done[-1] * np.arange(1, count) / count)
        return list(itertools.pairwise(sorted({first, *(ends + (first + 1)).tolist(), last})))

    def chunks_of(self, rows: Sequence[tuple[int, int]]) -> list[Span]:
        """The chunks that were cut from each (first, last + 1) of some rows."""
        bounds = np.searchsorted(np.ascontiguousarray(self.chunks["row"]), np.asarray(rows, np.int64))
        return [(first, last) for first, last in bounds.tolist()]


@dataclass(frozen=True)
class Batch:
    """Rows and chunks, half-open, that travel in one launch."""

    row: int
    row_end: int
    chunk: int
    chunk_end: int


def batches(table: HostTable, words: int, span: Span | None = None) -> Iterator[Batch]:
    """Cut a table, or a span of its chunks, so that scalars and each batch's rows and chunks fit in ``words`` words.

    Raises:
        ValueError: not even one row with one chunk fits.
    """
    row_words, chunk_words = table.lists + 2, 2 if table.lists_chunks else 0
    room = words - table.rows_at
    if room < row_words + chunk_words:
        raise ValueError(
            f"a launch carries {words * WORD} bytes; {table.rows_at} scalars and one row of {table.lists} lists need "
            f"{(table.rows_at + row_words + chunk_words) * WORD}: use another transport or fewer sets of scalars"
        )
    row = np.ascontiguousarray(table.chunks["row"])
    cost = (row + 1) * row_words + chunk_words * np.arange(1, len(row) + 1)  # words to the end of chunk i
    start, stop = span or (0, len(row))
    while start < stop:
        spent = int(row[start]) * row_words + chunk_words * start
        end = min(int(np.searchsorted(cost, spent + room, side="right")), stop)
        yield Batch(int(row[start]), int(row[end - 1]) + 1, start, end)
        start = end
