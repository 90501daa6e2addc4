"""A card that is played on a CPU: whole optimizers run on it as on a GPU, and end in the bits of a CPU.

It takes the place of the functions of ``cuda.bindings.driver`` (``played_driver.py``), of what torch knows of CUDA
(``played_torch.py``), and of compiled kernels: g++ compiles their own text (``host_build.py``).  What it is asked for
it does as late as it may (``played_order.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from host_build import build_traced
from played_driver import GRANULE, Driver
from played_memory import REGION, Memory, merged
from played_order import Order, Range, Touched
from played_torch import Torch

from pagedopt.kernels import cuda as kernels
from pagedopt.optim.overlap import everyone, overlap
from pagedopt.placements import movers
from pagedopt.placements.mapped import MappedArena
from pagedopt.system import driver, graphs, virtual, warn
from pagedopt.tables.layout import BLOCK
from pagedopt.transports import choose
from pagedopt.transports.transport import TABLE_AT

#: What is cached of a device, and must not be another one's.
_CACHED = (
    (driver, "capabilities"), (driver, "location"), (virtual, "_properties"), (virtual, "_access"),
    (choose, "_working"), (choose, "_shared"), (kernels, "multi_tensor_kernel"),
    (kernels, "prologue_kernel"), (kernels, "sums_kernel"), (kernels, "total_kernel"),
)  # fmt: skip
_TABLES: tuple[tuple[Any, str, Callable[[], Any]], ...] = (
    (movers, "_rings", dict), (overlap, "_sides", dict), (everyone, "with_queued", set), (driver, "ranges", dict),
    (virtual, "device_pages", dict), (virtual, "dead", list), (warn, "_said", set),
)  # fmt: skip


#: Finalizers of what the driver has lent.
_GIVE_BACK: tuple[tuple[Any, str], ...] = (
    (driver, "_free"),
    (driver, "destroy"),
    (virtual, "_free"),
    (graphs, "destroy"),
)


class Card:
    """The card, as a ``with`` block in which torch has it.

    Args:
        monkeypatch: undoes what is installed.
        first, early: see :class:`~played_order.Order`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: Sequence[int] = (), early: bool = False) -> None:
        self.order, self.memory = Order(first, early), Memory()
        self.driver = Driver(self.order, self.memory)
        self.torch = Torch(self.order, self.memory, self.driver)
        self.driver.install(monkeypatch)  # first: what is cached and in tables is then given back to it
        self.torch.install(monkeypatch)
        for module, name in _GIVE_BACK:
            monkeypatch.setattr(module, name, functools.partial(self._give_back, getattr(module, name)))
        for module, name in _CACHED:
            cached = getattr(module, name)
            monkeypatch.setattr(module, name, functools.cache(getattr(cached, "__wrapped__", cached)))
        for module, name, make in _TABLES:
            monkeypatch.setattr(module, name, make())
        monkeypatch.setattr(kernels, "CudaKernel", functools.partial(Kernel, self))
        monkeypatch.setattr(driver, "Buffer", functools.partial(Buffer, self))
        self._monkeypatch = monkeypatch

    def _give_back(self, give_back: Callable[..., None], *arguments: Any) -> None:
        """Call a finalizer, unless the card is gone: a real driver must not be given what was played."""
        if self.driver.is_installed:
            give_back(*arguments)

    @contextlib.contextmanager
    def playing(self) -> Iterator[Card]:
        """The block; at its end all is carried out, and nothing may have been at fault."""
        self._monkeypatch.setattr(MappedArena, "granule", GRANULE)
        self._monkeypatch.setattr(MappedArena, "stretch", GRANULE)
        with self.torch.modes():
            yield self
            gc.collect()
            self.order.wait()
        self.torch.close()
        assert not self.faults, "\n".join(self.faults)

    @property
    def faults(self) -> list[str]:
        """Bytes that were touched in no order, and memory that was touched and is not there."""
        return [*self.order.faults, *self.memory.faults]

    def kernel(
        self, stream: int, what: str, reads: Sequence[Range], writes: Sequence[Range], act: Callable[[], object]
    ) -> None:
        """Launch a kernel of a test's own; what it asserts in its turn is a fault."""

        def work() -> Touched:
            try:
                act()
            except AssertionError as error:
                self.order.faults.append(str(error))
            return reads, writes

        self.order.submit(stream, what, work)


class Kernel(kernels.CudaKernel):
    """The kernel's own text, compiled for the host."""

    def __init__(
        self,
        card: Card,
        text: str,
        name: str,
        device: int,
        chunks_per_block: int = 1,
        blocks: int | None = None,
        threads: int = BLOCK,
    ) -> None:
        play, library = build_traced(text, name)
        what = name.partition("<")[0]
        nbytes = {"prologue": kernels.PROLOGUE_AT, "total": kernels.TOTAL_AT}.get(what, TABLE_AT).itemsize

        def work_of(argument: npt.NDArray[Any], grid: int) -> Callable[[], Touched]:
            def work() -> Touched:
                base = card.memory.base
                library.traces_between(ctypes.c_ulonglong(base), ctypes.c_ulonglong(base + REGION))
                play(argument, grid, False)
                reads, writes = (merged(_touched(f)) for f in (library.traces_read, library.traces_written))
                card.memory.check(name, *reads, *writes)
                return reads, writes

            return work

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[npt.NDArray[Any]], stream: Any) -> None:
            # The argument is passed now, all else is read when its turn comes.
            card.order.submit(stream.ptr, what, work_of(arguments[0].copy(), grid[0]))

        def as_node(argument: int, grid: int) -> tuple[str, Callable[[], Touched]]:
            passed = np.frombuffer(ctypes.string_at(argument, nbytes), np.uint8).copy()
            return what, work_of(passed, grid)

        self._handle = len(card.driver.functions) + 1
        card.driver.functions[self._handle] = as_node
        self._kernel = launch
        self.chunks_per_block, self.most_blocks, self.threads = chunks_per_block, blocks, threads

    @property
    def handle(self) -> int:
        return self._handle


def _touched(function: Any) -> npt.NDArray[np.int64]:
    """The (n, 2) addresses and sizes of a list of ``traces.h``."""
    function.restype = ctypes.POINTER(ctypes.c_int64 * 3)
    address, count, _ = function().contents
    if not count:
        return np.zeros((0, 2), np.int64)
    found = np.frombuffer((ctypes.c_int64 * (2 * count)).from_address(address), np.int64).reshape(-1, 2)
    return found.copy()


_Buffer = driver.Buffer


class Buffer(_Buffer):
    """Its card sees what the host writes into it."""

    def __init__(self, card: Card, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.host = self.host.view(_Seen)
        self.host.card = card


class _Seen(np.ndarray):
    """Memory of the host that the card reads; a view of it, too."""

    card: Card

    def __array_finalize__(self, other: Any) -> None:
        self.card = getattr(other, "card", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        part = np.asarray(self)[key if isinstance(key, slice) else slice(None)]
        if self.card is not None and part.nbytes:
            begin = part.ctypes.data
            self.card.order.host("writing page-locked or managed memory", writes=[(begin, begin + part.nbytes)])
