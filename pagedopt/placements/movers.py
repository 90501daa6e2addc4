"""Pages through the device: a ring of slots, filled on one stream, updated on the caller's, emptied on a third."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..paging.pages import Layout
from ..paging.policy import SLOTS, Move
from ..system import driver
from .choose import Arena


class Ring:
    """Slots of one device.  The streams and the memory are there as long as this object.

    Args:
        device: where.
        slot_bytes: of the largest page.

    Attributes:
        copied_bytes: what has crossed the link so far, (up, down).

    Raises:
        torch.OutOfMemoryError: there is no room for the slots.
    """

    def __init__(self, device: torch.device, slot_bytes: int, slots: int = SLOTS) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self.memory = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
        self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        for stream in (self.up, self.down):
            self.memory.record_stream(stream)
        self.began, self.ended = driver.Event(device.index), driver.Event(device.index)
        self.filled = [driver.Event(device.index) for _ in range(slots)]
        self.updated = [driver.Event(device.index) for _ in range(slots)]
        self.emptied = [driver.Event(device.index) for _ in range(slots)]
        self.copied_bytes = [0, 0]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.memory.nbytes

    def address(self, slot: int) -> int:
        """Where a slot begins."""
        return self.memory.data_ptr() + slot * self.slot_bytes


def slot_bytes(layout: Layout) -> int:
    """Bytes of a slot for the pages of a layout."""
    return layout.page_numel * sum(layout.itemsizes)


def slot_offset(layout: Layout, section: int) -> int:
    """Where a section of a page lies in its slot."""
    return layout.page_numel * sum(layout.itemsizes[:section])


class StagedMover:
    """Carries pages through a ring; all in stream order, the host waits for nothing.

    Args:
        ring: of the device.
        arenas: by the number that moves name.
        stream: handle of the stream the updates are launched on.
    """

    def __init__(self, ring: Ring, arenas: Sequence[Arena], stream: int) -> None:
        self.ring, self.arenas, self.stream = ring, arenas, stream

    def begin(self) -> None:
        """Pages may be fetched once what was queued before (gradients, a loaded state) is done."""
        self.ring.began.record(self.stream)
        self.ring.began.hold(self.ring.up.cuda_stream)

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
        self.ring.ended.record(self.ring.down.cuda_stream)
        self.ring.ended.hold(self.stream)

    def _copy(self, move: Move, stream: int, to_device: bool) -> None:
        arena = self.arenas[move.arena]
        base, slot = arena.tensor.data_ptr(), self.ring.address(move.slot)
        for section, (offset, nbytes) in enumerate(arena.layout.stretches(move.page, move.page + 1)):
            ends = (slot + slot_offset(arena.layout, section), base + offset)
            driver.copy(*(ends if to_device else ends[::-1]), nbytes, stream)
            self.ring.copied_bytes[not to_device] += nbytes
