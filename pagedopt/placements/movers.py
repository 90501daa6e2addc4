"""How pages visit: through a ring of slots on the device, on streams of its own; or from and to a file, on a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from ..paging.pages import Layout
from ..paging.policy import SLOTS, Move
from ..system.cuda import driver

#: Elements, by whose multiples a lone page visits: its sections stay aligned in the slot.
LEAST = 1024


class Staged(Protocol):
    """What a :class:`StagedMover` asks of an arena."""

    layout: Layout
    tensor: torch.Tensor


class Filed(Protocol):
    """What a :class:`FileMover` asks of an arena (:class:`~pagedopt.placements.file.FileArena`)."""

    def fetch(self, page: int) -> None:
        """Begin to read a page that is away."""

    def evict(self, page: int) -> None:
        """Write back and drop a page that is away; waits for the disk."""

    def drop(self) -> None:
        """Drop what is in memory beyond the resident pages."""


class Ring:
    """Slots of one device.  The streams and the memory are there as long as this object.

    Optimizers share it (:func:`ring_for`): a slot is filled when the page before it has left, whoever's that was, on
    whatever stream it was updated.  The visits of one step are queued by one thread, which holds :attr:`lock`.

    Args:
        device: where.
        slot_bytes: of the largest page.

    Attributes:
        copied_bytes: what has crossed the link so far, (up, down).
        lock: held while moves are queued.

    Raises:
        torch.OutOfMemoryError: there is no room for the slots.
    """

    def __init__(self, device: torch.device, slot_bytes: int, slots: int = SLOTS) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self.memory = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
        self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.up.wait_stream(torch.cuda.current_stream(device))  # what had this memory before may be under way there
        for stream in (self.up, self.down):
            self.memory.record_stream(stream)
        self.began, self.ended = driver.Event(device.index), driver.Event(device.index)
        self.filled = [driver.Event(device.index) for _ in range(slots)]
        self.updated = [driver.Event(device.index) for _ in range(slots)]
        self.emptied = [driver.Event(device.index) for _ in range(slots)]
        self.copied_bytes = [0, 0]
        self.lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.memory.nbytes

    def address(self, slot: int) -> int:
        """Where a slot begins."""
        return self.memory.data_ptr() + slot * self.slot_bytes


_rings: dict[torch.device, weakref.WeakSet[Ring]] = {}
_making = threading.Lock()


def ring_for(device: torch.device, slot_bytes: int) -> Ring:
    """The ring of a device whose slots have so many bytes, which all share who ask for such: an estimate knows it.

    Raises:
        torch.OutOfMemoryError: the device has no room for the slots.
    """
    with _making:
        rings = _rings.setdefault(device, weakref.WeakSet())
        for ring in rings:
            if ring.slot_bytes == slot_bytes:
                return ring
        ring = Ring(device, slot_bytes)
        rings.add(ring)
        return ring


def _visited(layout: Layout) -> int:
    """Elements of a section that a page brings along: a lone page may be far from full."""
    least = max(layout.block, LEAST)
    return min(layout.page_numel, -(-layout.numel // least) * least) if layout.pages == 1 else layout.page_numel


def slot_bytes(layout: Layout) -> int:
    """Bytes of a slot for the pages of a layout."""
    return int(_visited(layout) * sum(layout.itemsizes))


def slot_offset(layout: Layout, section: int) -> int:
    """Where a section of a page lies in its slot."""
    return int(_visited(layout) * sum(layout.itemsizes[:section]))


class StagedMover:
    """Carries pages through a ring; all in stream order, the host waits for nothing.

    Args:
        ring: of the device.
        arenas: by the number that moves name.
        stream: handle of the stream the updates are launched on.
    """

    def __init__(self, ring: Ring, arenas: Sequence[Staged], stream: int) -> None:
        self.ring, self.arenas, self.stream = ring, arenas, stream

    def begin(self) -> None:
        """Pages may be fetched once what was queued before (gradients, a loaded state) is done."""
        self.ring.lock.acquire()
        try:
            self.ring.began.record(self.stream)
            self.ring.began.hold(self.ring.up.cuda_stream)
        except BaseException:
            self.ring.lock.release()
            raise

    def fetch(self, move: Move) -> None:
        """Copy a page into its slot as soon as that is empty."""
        up = self.ring.up.cuda_stream
        self.ring.emptied[move.slot].hold(up)
        self._copy(move, up, to_device=True)
        self.ring.filled[move.slot].record(up)

    def arrive(self, move: Move) -> None:
        """Let what is launched next wait for the page."""
        self.ring.filled[move.slot].hold(self.stream)

    def evict(self, move: Move) -> None:
        """Copy a page back once the launches so far are done."""
        down = self.ring.down.cuda_stream
        self.ring.updated[move.slot].record(self.stream)
        self.ring.updated[move.slot].hold(down)
        self._copy(move, down, to_device=False)
        self.ring.emptied[move.slot].record(down)

    def finish(self) -> None:
        """Let what is queued next find all state where it belongs."""
        try:
            self.ring.ended.record(self.ring.down.cuda_stream)
            self.ring.ended.hold(self.stream)
        finally:
            self.ring.lock.release()

    def _copy(self, move: Move, stream: int, to_device: bool) -> None:
        arena = self.arenas[move.arena]
        base, slot = arena.tensor.data_ptr(), self.ring.address(move.slot)
        visited = _visited(arena.layout)
        for section, (offset, nbytes) in enumerate(arena.layout.extents(move.page)):
            nbytes = min(nbytes, int(visited * arena.layout.itemsizes[section]))
            ends = (slot + slot_offset(arena.layout, section), base + offset)
            driver.copy(*(ends if to_device else ends[::-1]), nbytes, stream)
            self.ring.copied_bytes[not to_device] += nbytes


class FileMover:
    """Carries pages between memory and disk on a thread of its own, in the order of the calls.

    So a slot is emptied before it is filled again, and no more pages are in memory than there are slots.

    Args:
        arenas: by the number that moves name.
    """

    def __init__(self, arenas: Sequence[Filed]) -> None:
        self._arenas = arenas

    def begin(self) -> None:
        """Start the thread."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="pagedopt-file")
        self._fetches: dict[int, Future[None]] = {}  # by slot
        self._evictions: list[Future[None]] = []
        self._visited: set[int] = set()

    def fetch(self, move: Move) -> None:
        """Read a page ahead, once the evictions so far are done."""
        self._visited.add(move.arena)
        self._fetches[move.slot] = self._worker.submit(self._arenas[move.arena].fetch, move.page)

    def arrive(self, move: Move) -> None:
        """Wait until reading has begun; who touches a byte waits for that byte."""
        self._fetches.pop(move.slot).result()

    def evict(self, move: Move) -> None:
        """Write a page back and drop it, behind the caller's back."""
        self._evictions.append(self._worker.submit(self._arenas[move.arena].evict, move.page))

    def finish(self) -> None:
        """Wait for the disk, and drop what the kernel has read around the pages.

        Raises:
            MemoryError, OSError: a page could not be written; it is in the page cache still, and nowhere else.
        """
        self._worker.shutdown()
        for eviction in self._evictions:
            eviction.result()
        for number in self._visited:
            self._arenas[number].drop()
