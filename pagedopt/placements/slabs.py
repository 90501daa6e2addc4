"""Slabs: pages that the arenas of several optimizers share, for state of a few bytes.

The smallest page of an arena is a granule of each section: 4 MiB on a GPU for two moments of a bias.  With an optimizer
per parameter that adds up, so once a process has a few such arenas, the next ones get parts of a slab instead.  A slab
is an arena of one page.  It is resident while all optimizers that have a part of it want it to be, so that no budget is
exceeded.  A step copies or updates only the bytes of its own part.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from ..paging.pages import Layout, lay_out
from ..system.cuda import driver
from ..system.files import libc
from ..system.files.holes import Holes
from ..system.files.state_file import state_folder
from ..system.interrupts import Uninterrupted
from ..system.state_lost import StateLost
from .arena import Arena
from .file import FileArena
from .managed import ManagedArena
from .mapped import MappedArena
from .plain import PinnedArena

#: State gets parts of slabs once arenas of one page take this many bytes, or four granules if that is more.
OWN = 2 << 20
#: Parts begin at multiples of this many bytes: a cache line.
_LINE = 64
#: Smallest slab in bytes, and largest in granules: each new slab is larger by one granule than the one before.
_MIN_BYTES, _MAX_GRANULES = 64 << 10, 8


class Slab:
    """An arena of one page that parts share.  It lives as long as any tensor that views it.

    ``lock`` is held while the page moves, and during launches on a part of it.
    """

    def __init__(self, kind: type[Arena], device: torch.device, nbytes: int, near: bool) -> None:
        self.arena = kind(lay_out([nbytes], [1], nbytes, nbytes), device, int(near))
        self.lock = threading.RLock()
        self.lost = ""  # why a move has lost the page; "" if none has
        self._holes = Holes()
        self._holes.add(0, nbytes)
        self._used = 0  # bytes from the beginning that parts have used: they may not be zero
        self.wants_near: dict[int, bool] = {}  # whether a part wants the page resident, by where the part begins

    @property
    def near(self) -> bool:
        """Whether the page is resident."""
        return self.arena.resident > 0

    def take(self, nbytes: int, near: bool) -> torch.Tensor | None:
        """Return a zeroed part, given back when its last view dies; None if there is no room on the side wanted."""
        size = -(-nbytes // _LINE) * _LINE
        with self.lock:
            if self.lost or (self.arena.paged and self.near != near) or (begin := self._holes.take(size)) is None:
                return None
            self.wants_near[begin] = near
        whole = self.arena.tensor
        owner: Any = _Owner() if whole.is_cuda else np.ndarray(nbytes, np.uint8, self.arena.on_host, begin)
        weakref.finalize(owner, self._give_back, begin, size).atexit = False
        if whole.is_cuda:
            memory = driver.view(whole.data_ptr() + begin, nbytes, whole.device.index, owner, part=True)
        else:
            memory = torch.frombuffer(owner, dtype=torch.uint8)
        if begin < self._used:
            if memory.is_cuda:
                torch.cuda.synchronize(memory.device)  # launches on the part that was here before may still run
            memory.zero_()
        self._used = max(self._used, begin + size)
        return memory

    def _give_back(self, begin: int, size: int) -> None:
        del self.wants_near[begin]
        self._holes.add(begin, size)

    def settle(self, begin: int, near: bool) -> None:
        """Note where the part at ``begin`` wants the page, and move the page to where all parts want it.

        Raises:
            MemoryError, torch.OutOfMemoryError, CudaError, OSError: there is no room; nothing has changed.
            StateLost: see :meth:`Arena.move`.
        """
        with self.lock:
            before, self.wants_near[begin] = self.wants_near[begin], near
            try:
                if (all_near := all(list(self.wants_near.values()))) != self.near:
                    self.arena.move(int(all_near))
            except StateLost as error:
                self.lost = str(error)
                raise
            except BaseException:
                self.wants_near[begin] = before
                raise


class _Owner:
    """An object that a tensor on a device keeps alive."""


class Part(Arena):
    """An arena that is a part of a slab.  Its subclasses (:func:`part_of`) also inherit from the slab's placement."""

    kind: ClassVar[type[Arena]]
    full = True

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        self.layout, self.device = layout, device
        with Uninterrupted():
            self._slab, self.tensor = _pool.take(self.kind, device, layout.nbytes, resident > 0)
        self._begin = self.tensor.data_ptr() - self._slab.arena.tensor.data_ptr()

    @property
    def resident(self) -> int:  # type: ignore[override]
        """1 if the slab's page is resident, else 0."""
        return int(self._slab.near)

    @property
    def wanted(self) -> int:
        """1 if this part wants the page to be resident, else 0."""
        return int(self._slab.wants_near[self._begin])

    @property
    def lock(self) -> threading.RLock:  # type: ignore[override]
        """The lock of the slab."""
        return self._slab.lock

    def move(self, resident: int) -> None:
        """Move the slab's page; bring it in only if all other parts want that, too."""
        self._slab.settle(self._begin, resident > 0)

    def check_owner(self) -> None:
        """Check the owner of the slab; raise StateLost if a move for another optimizer has lost the shared page."""
        if self._slab.lost:
            raise StateLost(f"with that of another optimizer: {self._slab.lost}, into a new optimizer")
        self._slab.arena.check_owner()

    def prepare(self) -> None:
        """Prepare the slab."""
        self.check_owner()
        self._slab.arena.prepare()

    def drop(self) -> None:
        """Drop pages of the slab."""
        self._slab.arena.drop()

    def fetch(self, page: int) -> None:
        """Begin to read this part of the slab's file."""
        cast(FileArena, self._slab.arena).fetch_bytes(*self._whole_pages())

    def evict(self, page: int) -> None:
        """Write this part back and drop it."""
        cast(FileArena, self._slab.arena).evict_bytes(*self._whole_pages())

    def _whole_pages(self) -> tuple[int, int]:
        """Return (offset, bytes) of the operating system's pages in the slab that overlap this part."""
        begin = self._begin // libc.PAGE * libc.PAGE
        return begin, -(-(self._begin + self.layout.nbytes) // libc.PAGE) * libc.PAGE - begin

    def measured(self) -> dict[str, int]:
        """Return this part's fraction of the slab's bytes."""
        slab, mine = self._slab.arena, self.layout.nbytes
        return {place: nbytes * mine // slab.layout.nbytes for place, nbytes in slab.measured().items()}


#: What arenas that share a slab have in common: placement, device, and the folder of state files if it has files.
_Where = tuple[type[Arena], torch.device, Path | None]


def _where(kind: type[Arena], device: torch.device) -> _Where:
    return kind, device, state_folder() if issubclass(kind, FileArena) else None


class _Pool:
    """The slabs of this process, and its arenas of one page that are not in slabs."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.slabs: dict[_Where, weakref.WeakSet[Slab]] = {}
        self.own: dict[_Where, weakref.WeakSet[Arena]] = {}

    def take(self, kind: type[Arena], device: torch.device, nbytes: int, near: bool) -> tuple[Slab, torch.Tensor]:
        with self._lock:
            slabs = self.slabs.setdefault(_where(kind, device), weakref.WeakSet())
            for slab in (there := list(slabs)):
                if (memory := slab.take(nbytes, near)) is not None:
                    return slab, memory
            unit = max(kind.granule, _MIN_BYTES)
            slab = Slab(kind, device, -(-max(nbytes, unit * min(_MAX_GRANULES, 1 + len(there))) // unit) * unit, near)
            slabs.add(slab)
            memory = slab.take(nbytes, near)
            assert memory is not None, "a slab that is too small for what it was made for"
            return slab, memory

    def is_crowded(self, kind: type[Arena], device: torch.device) -> bool:
        own = self.own.get(_where(kind, device), ())
        return sum(arena.layout.nbytes for arena in list(own)) >= max(OWN, 4 * kind.granule)


_pool = _Pool()


def part_of(kind: type[Arena]) -> type[Arena]:
    """Return the class for parts of slabs of a placement."""
    ways = tuple(sorted(kind.ways, key=("in_place", "staged").index))  # in place first: a part is not worth a copy
    return type(f"{kind.__name__}Part", (Part, kind), {"name": kind.name, "kind": kind, "ways": ways, "granule": 0})


#: Classes of parts by placement.  A class of one's own has no slabs: it may count the arenas that are made.
PARTS: dict[type[Arena], type[Arena]] = {k: part_of(k) for k in (MappedArena, ManagedArena, PinnedArena, FileArena)}


def serves(kind: type[Arena], layout: Layout, device: torch.device) -> bool:
    """Return whether state with this layout should be a part of a slab instead of an arena of its own."""
    return kind in PARTS and layout.pages == 1 and _pool.is_crowded(kind, device)


def note(arena: Arena) -> None:
    """Count an arena of one page towards :meth:`_Pool.is_crowded`."""
    if type(arena) in PARTS and arena.layout.pages == 1:
        _pool.own.setdefault(_where(type(arena), arena.device), weakref.WeakSet()).add(arena)


def _after_fork() -> None:
    """In a forked child, make new slabs, as it shares the parent's files, and new locks, as their holders are gone."""
    global _pool
    for slab in itertools.chain.from_iterable(_pool.slabs.values()):
        slab.lock = threading.RLock()
    _pool = _Pool()


os.register_at_fork(after_in_child=_after_fork)
