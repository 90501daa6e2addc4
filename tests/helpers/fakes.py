"""A device made of queues: what is launched happens later, when an event is waited for or a test says so."""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedopt.system.cuda import driver, graphs
from pagedopt.tables.layout import HEADER, Geometry, HostTable
from pagedopt.transports import choose, pool, ring
from pagedopt.transports.transport import TABLE_AT, Transport

#: Takes an argument and the number of chunks in it.
Kernel = Callable[[np.ndarray, int], None]


def words_at(address: int, count: int) -> np.ndarray:
    """A copy of ``count`` words of memory."""
    return np.frombuffer((ctypes.c_uint64 * count).from_address(address), np.uint64).copy()


class FakeBuffer:
    """Ordinary memory in the place of managed or page-locked memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._words = np.full(-(-nbytes // 8), 0xDEAD, np.uint64)  # memory is not zero
        self.host = self._words.view(np.uint8)[:nbytes]
        self.address = self._words.ctypes.data


class FakeCuda:
    """Streams as queues.  Calls are counted; ``refuse`` holds the names of allocators that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **capabilities: bool) -> None:
        self.queues: dict[int, deque[Callable[[], None]]] = defaultdict(deque)
        self.graph: list[Callable[[], None]] | None = None
        self.kept: list[Any] = []  # what graphs keep alive
        self.calls: list[str] = []
        self.refuse: dict[str, str] = {}
        has = {"managed": True, "concurrent_managed": True, "mapped": True, **capabilities}
        fake_torch = SimpleNamespace(
            empty=lambda n, dtype, device: torch.full((n,), 0xAD, dtype=dtype),
            uint8=torch.uint8,
            cuda=SimpleNamespace(is_current_stream_capturing=lambda: self.graph is not None),
        )
        monkeypatch.setattr(ring, "torch", fake_torch)
        monkeypatch.setattr(pool, "_pool_of", functools.cache(pool._pool_of.__wrapped__))
        monkeypatch.setattr(choose, "_working", functools.cache(choose._working.__wrapped__))
        monkeypatch.setattr(driver, "capabilities", lambda device: driver.Capabilities(**has))
        for kind in ("managed", "mapped", "pinned"):
            monkeypatch.setattr(driver, f"allocate_{kind}", functools.partial(self._allocate, kind))
        monkeypatch.setattr(driver, "advise", lambda *a: self.calls.append("advise"))
        monkeypatch.setattr(driver, "prefetch", lambda *a: self.calls.append("prefetch"))
        monkeypatch.setattr(driver, "copy_to_device", self._copy)
        monkeypatch.setattr(driver, "Event", lambda device: FakeEvent(self))
        monkeypatch.setattr(graphs, "keep_with_graph", lambda stream, kept: self.kept.append(kept))

    def _allocate(self, kind: str, nbytes: int, device: int) -> FakeBuffer:
        self.calls.append(kind)
        if kind in self.refuse:
            raise driver.CudaError(f"allocate_{kind}", self.refuse[kind], "operation not supported")
        return FakeBuffer(nbytes)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.submit(stream, lambda: ctypes.memmove(target, source, nbytes) and None)

    def submit(self, stream: int, work: Callable[[], None]) -> None:
        """Work for later; part of the graph while one is captured."""
        (self.graph if self.graph is not None else self.queues[stream]).append(work)

    def drain(self, stream: int, count: int | None = None) -> None:
        """Let a stream do ``count`` pieces of work, or all."""
        queue = self.queues[stream]
        while queue and (count is None or count > 0):
            queue.popleft()()
            count = None if count is None else count - 1

    def launch(self, table: HostTable, stream: int) -> Kernel:
        """A kernel that reads its table when its turn comes, and must find it as it was when launched."""
        want, header = table.words.copy(), table.header()

        def kernel(argument: np.ndarray, count: int) -> None:
            fields = argument.view(TABLE_AT)
            at, passed = int(fields["words"][0]), fields["header"].copy()
            assert count == len(table.chunks)

            def read() -> None:
                assert passed.view(np.int64).tolist() == header.view(np.int64).tolist()
                now = words_at(at, len(want))
                assert np.array_equal(now, want), "a table was rewritten under a launch, or never sent"

            self.submit(stream, read)

        return kernel

    def run(self, way: Transport, table: HostTable, stream: int) -> int:
        """Launch that kernel over a table that is lent; returns the number of launches."""
        return run(way, table, stream, self.launch(table, stream))

    def run_changed(self, way: Transport, table: HostTable, count: int, stream: int = 7) -> None:
        """So many launches, each of a table with other words."""
        for step in range(count):
            change(table, step, "both")
            self.run(way, table, stream)

    def capture(self, way: Transport, table: HostTable, stream: int = 7) -> list[Callable[[], None]]:
        """The graph of one launch."""
        graph = self.graph = []
        self.run(way, table, stream)
        self.graph = None
        return graph


def run(way: Transport, table: HostTable, stream: int, kernel: Kernel) -> int:
    """Launch over a table that is lent, as a sweep does; returns the number of launches."""
    launches = 0
    with way.lend(table, stream) as lent:
        for argument, count in lent.parts():
            kernel(argument, count)
            launches += 1
    return launches


class FakeEvent:
    """Knows its place in the queue; waiting lets the stream run up to it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.stream, self.passed = cuda, -1, True

    def record(self, stream: int) -> None:
        assert self.cuda.graph is None, "an event recorded during capture joins the graph"
        self.stream, self.passed = stream, False
        mark = self.mark = object()

        def reach() -> None:
            self.passed = self.passed or mark is self.mark

        self.cuda.submit(stream, reach)

    def has_passed(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.cuda.calls.append("wait")
        while not self.passed:
            self.cuda.drain(self.stream, 1)


#: Scalars, and for each chunk the words of its row and its offset.
Decoded = tuple[list[float], list[tuple[list[int], int]]]


def decode(argument: np.ndarray, table: HostTable) -> Decoded:
    """The scalars of an argument, and for each chunk (its row's words, its offset), as a kernel reads them."""
    if argument.nbytes == TABLE_AT.itemsize:
        at = argument.view(TABLE_AT)
        header, words = at["header"][0], words_at(int(at["words"][0]), len(table.words))
    else:
        fields = argument.view(np.dtype([("header", HEADER), ("words", np.uint64, (argument.nbytes // 8 - 4,))]))
        header, words = fields["header"][0], fields["words"][0]
    row_words = table.rows.itemsize // 8
    scalars = words[: table.rows_at].view(np.float64).tolist()
    found = []
    for item in range(int(header["count"])):
        listed = int(header["chunks"]) >= 0
        row, offset = words[int(header["chunks"]) + 2 * item :][:2].view(np.int64).tolist() if listed else (item, 0)
        at = int(header["rows"]) + row * row_words
        end = int(header["chunks"]) if listed else len(words)
        assert table.rows_at <= at <= end - row_words, "a row outside the argument"
        found.append((words[at : at + row_words].tolist(), offset))
    return scalars, found


def filled(numels: list[int], lists: int = 2, uniforms: int = 2, sets: int = 1, seed: int = 0) -> HostTable:
    table = HostTable(lists, numels, uniforms, sets, Geometry(1024, 32))
    change(table, seed, "both")
    return table


def change(table: HostTable, seed: int, what: str) -> None:
    """Other scalars, other rows, or both: every word that may differ does."""
    if what in ("scalars", "both"):
        table.set_scalars(seed + np.arange(table.scalars.size).reshape(table.scalars.shape) / 7)
    if what in ("rows", "both"):
        table.rows["address"] = 1000 * seed + np.arange(table.rows["address"].size).reshape(-1, table.lists)
        table.rows_changed()
