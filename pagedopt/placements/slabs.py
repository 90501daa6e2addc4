"""State of a few bytes: parts of slabs, which the optimizers of a process share.

A page of an arena of its own is a granule of each section: 4 MiB on a GPU for two moments of a bias.  With an optimizer
per parameter that adds up, so who comes when a few such arenas are there gets a part of a slab: one page, made as any
arena of its placement is.  It is with the device while all who have a part of it would have it there, so that no budget
is exceeded; a step copies, or updates in place, its own bytes alone.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import torch

from ..paging.pages import Layout, lay_out
from ..system.cuda import driver
from ..system.files import libc
from ..system.files.holes import Holes
from ..system.files.state_file import state_folder
from ..system.interrupts import Uninterrupted
from .arena import Arena, StateLost
from .file import FileArena
from .managed import ManagedArena
from .mapped import MappedArena
from .plain import PinnedArena

#: Arenas of one page that are made before others share: four granules of them, or so many bytes.
OWN = 2 << 20
#: Parts begin at multiples of this many bytes, those of a cache line.
_LINE = 64
#: The least bytes of a slab, and how many granules it grows to where there are many.
_LEAST, _MOST = 64 << 10, 8


class Slab:
    """A page of one placement, in which arenas have parts.  It is there as long as any tensor that views it.

    Args:
        kind: the placement.
        device: of the parameters.
        nbytes: of the page.
        near: whether it rests on the device.

    Attributes:
        arena: its memory.
        lock: held by who moves the page, and by who has launches on a part of it.

    Raises:
        MemoryError, torch.OutOfMemoryError, CudaError: there is no room.
    """

    def __init__(self, kind: type[Arena], device: torch.device, nbytes: int, near: bool) -> None:
        self.arena = kind(lay_out([nbytes], [1], nbytes, nbytes), device, int(near))
        self.lock = threading.RLock()
        self.lost = ""
        self._holes = Holes()
        self._holes.add(0, nbytes)
        self._used = 0  # bytes from the beginning that have been somebody's
        self._wants: dict[int, bool] = {}  # by where a part begins, whether it would be near

    @property
    def near(self) -> bool:
        """Whether the page rests on the device."""
        return self.arena.resident > 0

    def take(self, nbytes: int, near: bool) -> torch.Tensor | None:
        """Zeros that are given back with the last tensor that views them; None: no room for them, or not there."""
        size = -(-nbytes // _LINE) * _LINE
        with self.lock:
            if self.lost or (self.arena.paged and self.near != near):
                return None
            if (begin := self._holes.take(size)) is None:
                return None
            self._wants[begin] = near
        memory = self._memory(begin, nbytes, size)
        if begin < self._used:
            if memory.is_cuda:
                torch.cuda.synchronize(memory.device)  # launches of who had it may still be under way
            memory.zero_()
        self._used = max(self._used, begin + size)
        return memory

    def _memory(self, begin: int, nbytes: int, size: int) -> torch.Tensor:
        whole = self.arena.tensor
        if not whole.is_cuda:
            part = _Part(nbytes, np.uint8, self.arena.on_host, begin)
            weakref.finalize(part, self._give_back, begin, size).atexit = False
            return torch.frombuffer(part, dtype=torch.uint8)
        owner = _Owner()
        weakref.finalize(owner, self._give_back, begin, size).atexit = False
        return driver.view(whole.data_ptr() + begin, nbytes, whole.device.index, owner, part=True)

    def _give_back(self, begin: int, size: int) -> None:
        del self._wants[begin]
        self._holes.add(begin, size)

    def wants(self, begin: int) -> bool:
        """Whether the part that begins there would be near."""
        return self._wants[begin]

    def settle(self, begin: int, near: bool) -> None:
        """Move the page to where all would have it.

        Args:
            begin: of the part that would be ``near`` from now on, or would not.

        Raises:
            MemoryError, torch.OutOfMemoryError, CudaError, OSError: there is no room; nothing has changed.
            StateLost: see :meth:`Arena.move`.
        """
        with self.lock:
            before, self._wants[begin] = self._wants[begin], near
            try:
                if (all_near := all(list(self._wants.values()))) != self.near:
                    self.arena.move(int(all_near))
            except StateLost as error:
                self.lost = str(error)
                raise
            except BaseException:
                self._wants[begin] = before
                raise


class _Part(np.ndarray):
    """Bytes whose end can be seen."""


class _Owner:
    """What memory of a device is there for."""


class Part(Arena):
    """One page that is a part of a slab; as :class:`Arena` otherwise.  Its class is that of its slab, too."""

    kind: ClassVar[type[Arena]]
    full = True

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        self.layout, self.device = layout, device
        with Uninterrupted():
            self._slab, self.tensor = _pool.take(self.kind, device, layout.nbytes, resident > 0)
        self._begin = self.tensor.data_ptr() - self._slab.arena.tensor.data_ptr()

    @property
    def resident(self) -> int:  # type: ignore[override]
        """The page, if the slab's is on the device."""
        return int(self._slab.near)

    @property
    def wanted(self) -> int:
        """Whether the page would be there if it were this one's alone."""
        return int(self._slab.wants(self._begin))

    @property
    def lock(self) -> threading.RLock:  # type: ignore[override]
        """The slab's."""
        return self._slab.lock

    def move(self, resident: int) -> None:
        """The slab's page moves, unless somebody else who has a part of it would have it away."""
        self._slab.settle(self._begin, resident > 0)

    def check_owner(self) -> None:
        """As the slab's.

        Raises:
            RuntimeError: see :meth:`Arena.check_owner`.
            StateLost: a move for another optimizer has lost this one's state, too.
        """
        if self._slab.lost:
            raise StateLost(f"with that of another optimizer: {self._slab.lost}, into a new optimizer")
        self._slab.arena.check_owner()

    def prepare(self) -> None:
        """As the slab's."""
        self.check_owner()
        self._slab.arena.prepare()

    def drop(self) -> None:
        """As the slab's."""
        self._slab.arena.drop()

    def fetch(self, page: int) -> None:
        """Begin to read what of the file this is."""
        cast(FileArena, self._slab.arena).fetch_bytes(*self._whole_pages())

    def evict(self, page: int) -> None:
        """Write that back and drop it."""
        cast(FileArena, self._slab.arena).evict_bytes(*self._whole_pages())

    def _whole_pages(self) -> tuple[int, int]:
        """(offset, bytes) of the operating system's pages in the slab that have any of it."""
        begin = self._begin // libc.PAGE * libc.PAGE
        return begin, -(-(self._begin + self.layout.nbytes) // libc.PAGE) * libc.PAGE - begin

    def measured(self) -> dict[str, int]:
        """Its share of the slab's bytes."""
        slab, mine = self._slab.arena, self.layout.nbytes
        return {place: nbytes * mine // slab.layout.nbytes for place, nbytes in slab.measured().items()}


#: Placement, device, and the folder of its files if it has some: parts are of one slab where these are one.
_Where = tuple[type[Arena], torch.device, Path | None]


def _where(kind: type[Arena], device: torch.device) -> _Where:
    return kind, device, state_folder() if issubclass(kind, FileArena) else None


class _Pool:
    """The slabs of this process, and the arenas that came before them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._slabs: dict[_Where, weakref.WeakSet[Slab]] = {}
        self._own: dict[_Where, weakref.WeakSet[Arena]] = {}

    def take(self, kind: type[Arena], device: torch.device, nbytes: int, near: bool) -> tuple[Slab, torch.Tensor]:
        with self._lock:
            slabs = self._slabs.setdefault(_where(kind, device), weakref.WeakSet())
            for slab in (there := list(slabs)):
                if (memory := slab.take(nbytes, near)) is not None:
                    return slab, memory
            unit = max(kind.granule, _LEAST)
            slab = Slab(kind, device, -(-max(nbytes, unit * min(_MOST, 1 + len(there))) // unit) * unit, near)
            slabs.add(slab)
            memory = slab.take(nbytes, near)
            assert memory is not None, "a slab that is too small for what it was made for"
            return slab, memory

    def is_crowded(self, kind: type[Arena], device: torch.device) -> bool:
        own = self._own.get(_where(kind, device), ())
        return sum(arena.layout.nbytes for arena in list(own)) >= max(OWN, 4 * kind.granule)

    def add(self, arena: Arena) -> None:
        self._own.setdefault(_where(type(arena), arena.device), weakref.WeakSet()).add(arena)

    def renew_locks(self) -> None:
        for slabs in self._slabs.values():
            for slab in slabs:
                slab.lock = threading.RLock()


_pool = _Pool()


def part_of(kind: type[Arena]) -> type[Arena]:
    """The class of parts of slabs of a placement."""
    ways = tuple(sorted(kind.ways, key=("in_place", "staged").index))  # so little is not worth a visit
    return type(f"{kind.__name__}Part", (Part, kind), {"name": kind.name, "kind": kind, "ways": ways, "granule": 0})


#: Parts by the placements that have slabs.  A class from outside of this package has none: it may count what it gives.
PARTS: dict[type[Arena], type[Arena]] = {
    kind: part_of(kind) for kind in (MappedArena, ManagedArena, PinnedArena, FileArena)
}


def serves(kind: type[Arena], layout: Layout, device: torch.device) -> bool:
    """Whether state that takes one page of an arena of its own should have a part of a slab."""
    return kind in PARTS and layout.pages == 1 and _pool.is_crowded(kind, device)


def note(arena: Arena) -> None:
    """Count an arena that was made, if it is one of those whose number makes others share."""
    if type(arena) in PARTS and arena.layout.pages == 1:
        _pool.add(arena)


def _after_fork() -> None:
    """A child shares what its parent has in files, and makes slabs of its own; who held a lock is not there."""
    global _pool
    _pool.renew_locks()
    _pool = _Pool()


os.register_at_fork(after_in_child=_after_fork)
