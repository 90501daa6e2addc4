"""Tables on a played card, and a kernel that must find them as they were when it was launched; a sweep with a log."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import F32, lists_for, scalars_for

from pagedopt import Sweep
from pagedopt.kernels import cuda as kernels
from pagedopt.paging.policy import Move
from pagedopt.paging.visits import Action, plan
from pagedopt.rules import RULES
from pagedopt.tables.layout import HEADER, Geometry, HostTable
from pagedopt.transports.transport import TABLE_AT, Transport
from tests.card.card import Card
from tests.card.driver import Result
from tests.card.order import Graph
from tests.card.tensors import CUDA

#: Takes an argument and the number of chunks in it.
Kernel = Callable[[np.ndarray, int], None]


def words_at(address: int, count: int) -> np.ndarray:
    """``count`` words of memory, to read and to write."""
    return np.frombuffer((ctypes.c_uint64 * count).from_address(address), np.uint64)


#: What a driver that refuses a kind of memory refuses.
REFUSED = {"managed": "cuMemAllocManaged", "mapped": "cuMemHostGetDevicePointer"}


class Tables:
    """Launches of a kernel that only reads its table, on a card whose events say what has happened."""

    def __init__(self, card: Card) -> None:
        self.card = card

    def count(self, what: str) -> int:
        """How often the host waited for an event, or a kind of memory was allocated."""
        names = {"wait": "cuEventSynchronize", **REFUSED, "pinned": "cuMemHostAlloc"}
        mapped = self.card.driver.calls.count(REFUSED["mapped"]) if what == "pinned" else 0
        return self.card.driver.calls.count(names[what]) - mapped

    @property
    def allocations(self) -> int:
        return sum(map(self.count, ("managed", "mapped", "pinned")))

    def refuse(self, *kinds: str) -> None:
        """Let the driver refuse kinds of memory."""
        names = [REFUSED[kind] for kind in kinds]
        self.card.driver.before = lambda name: Result.CUDA_ERROR_NOT_SUPPORTED if name in names else None

    def drain(self, stream: int, count: int | None = None) -> None:
        """Let a stream do ``count`` pieces of work, or all, and what they wait for; nothing may be at fault."""
        order = self.card.order
        work = list(order.queues[stream])[:count]
        order.run(work[-1].clock if work else {})
        assert not self.card.faults, self.card.faults

    def launch(self, table: HostTable, stream: int) -> Kernel:
        """A kernel that reads its table when its turn comes, and must find it as it was when launched."""
        want = table.words.copy()

        def kernel(argument: np.ndarray, count: int) -> None:
            at = int(argument.view(TABLE_AT)["words"][0])

            def read() -> None:
                same = np.array_equal(words_at(at, len(want)), want)
                assert same, "a table was rewritten under a launch, or never sent"

            self.card.kernel(stream, "a kernel", [(at, at + want.nbytes)], [], read)

        return kernel

    def run(self, way: Transport, table: HostTable, stream: int) -> int:
        """Launch that kernel over a table that is lent; returns the number of launches."""
        launch = self.launch(table, stream)

        def whole(argument: np.ndarray, count: int) -> None:
            assert (argument.view(TABLE_AT)["header"], count) == (table.header(), len(table.chunks))
            launch(argument, count)

        return run(way, table, stream, whole)

    def run_changed(self, way: Transport, table: HostTable, count: int, stream: int = 7) -> None:
        """So many launches, each of a table with other words."""
        for step in range(count):
            change(table, step, "both")
            self.run(way, table, stream)

    def capture(self, act: Callable[..., object], *arguments: Any, stream: int = 7) -> Graph:
        """The graph of an act on a stream."""
        with self.card.torch.on_handle(stream):
            graph = self.card.order.capture(stream)
            try:
                act(*arguments)
            finally:
                self.card.order.end_capture(graph)
        return graph

    def replay(self, graph: Graph, stream: int = 7) -> None:
        """Replay a graph, and wait for it."""
        self.card.order.replay(graph, stream)
        self.drain(stream)


def run(way: Transport, table: HostTable, stream: int, kernel: Kernel) -> int:
    """Launch over a table that is lent, as a sweep does; returns the number of launches."""
    launches = 0
    with way.lend(table, stream) as lent:
        for argument, count in lent.parts():
            kernel(argument, count)
            launches += 1
    return launches


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


ADAMW = RULES["adamw"]
STREAM = 0


class Device:
    """Runs a sweep on a played card, and keeps a log of what it does; its kernel only reads its table.

    Its transport is of a name or class that ``Sweep`` takes.

    ``fails`` names what raises: ``compile``, ``fetch``, ``launch``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: Tables, kind: Any, sizes: tuple[int, ...]) -> None:
        self.cuda = cuda
        self.log: list[str] = []
        self.fails = ""
        lists = [[t.to(CUDA) for t in tensors] for tensors in lists_for(ADAMW, sizes, (F32,) * 4)]
        self.sweep = Sweep(ADAMW, lists, transport=kind)
        monkeypatch.setattr(kernels, "CudaKernel", self.kernel)

    def note(self, what: str, detail: object = "") -> None:
        self.log.append(f"{what} {detail}".strip())
        if what == self.fails:
            raise OSError(what)

    def kernel(self, text: str, name: str, *_: Any) -> Any:
        """In the place of a compiled kernel: when its turn comes it must find the table as it was when launched."""
        self.note("compile")
        by_value = "TableAt" not in name
        table = self.sweep.table.host

        def launch(argument: np.ndarray, count: int, stream: kernels.Stream) -> None:
            assert self.sweep.begun, "an interrupt that came now would find that nothing has begun"
            assert by_value == (argument.nbytes > 1000), "a kernel for another kind of argument"
            self.note("launch", count)
            if by_value:
                assert len(decode(argument, table)[1]) == count
            else:
                self.cuda.launch(table, stream.ptr)(argument, count)

        return launch

    def __getattr__(self, what: str) -> Any:
        """As a mover: ``begin``, ``fetch``, ``arrive``, ``evict``, ``finish``."""
        if what not in ("begin", "fetch", "arrive", "evict", "finish"):
            raise AttributeError(what)
        return lambda *moves: self.note(what, *(move.page for move in moves))

    def step(self, number: int, steps: list[Action] | None = None) -> None:
        scalars = [ADAMW.uniforms(scalars_for(ADAMW, number))]
        if steps is None:
            self.sweep.launch(scalars)
        else:
            self.sweep.launch(scalars, steps, self)

    def drain(self) -> None:
        """Let the sweep's stream do all its work."""
        self.cuda.drain(STREAM)

    def steps(self) -> list[Action]:
        """The first chunk at hand, two pages that visit."""
        end = len(self.sweep.table.host.chunks)
        return plan((0, 1), [(Move(0, 8, 0), (1, 3)), (Move(0, 9, 1), (3, end))])
