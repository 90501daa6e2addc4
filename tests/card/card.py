"""A card that is played on a CPU: whole optimizers run on it as on a GPU, and end in the bits of a CPU.

It takes the place of the functions of ``cuda.bindings.driver`` (``driver.py``), of what torch knows of CUDA
(``tensors.py``), and of compiled kernels: g++ compiles their own text (``kernels.py``).  What it is asked for it does
as late as it may (``order.py``).  ``runs.py`` plays optimizers on it, ``tables.py`` single tables.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedopt.kernels import cuda as kernels
from pagedopt.optim.overlap import everyone, overlap
from pagedopt.placements import movers
from pagedopt.placements.mapped import MappedArena
from pagedopt.system import driver, graphs, virtual, warn
from pagedopt.transports import choose
from tests.card.driver import GRANULE, Driver
from tests.card.kernels import Kernel
from tests.card.order import Memory, Order, Range, Touched
from tests.card.tensors import Torch

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
        first, early: see :class:`~tests.card.order.Order`.
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
        self.torch.closed = True
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


class Pages(MappedArena):
    """Mapped pages of a card that is memory of this system, for parameters on a CPU; updated in place."""

    devices = ("cpu",)
    granule = GRANULE
    ways = ("in_place",)

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        return ""


def install_pages(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Put the driver of a card, whose memory is all free, in the place of the last one: for :class:`Pages`."""
    card = Card(monkeypatch, early=True)
    monkeypatch.setattr(virtual, "view", lambda address, nbytes, device, owner: card.torch.view(address, nbytes, owner))
    monkeypatch.setattr(virtual, "_properties", lambda where, device: None)  # a CPU has no number
    monkeypatch.setattr(virtual, "_access", lambda device: None)
    return card.driver
