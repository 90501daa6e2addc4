"""Device pages and page-locked host pages in one range, mapped by us: it cannot thrash and may exceed the card."""

from __future__ import annotations

import torch

from ..paging.pages import GRANULE, Layout
from ..system.cuda import driver, virtual
from ..system.cuda.driver import Location
from ..system.files.host import check_host
from ..system.interrupts import Uninterrupted
from .arena import Arena


class MappedArena(Arena):
    """CUDA virtual memory: copy engines reach the host part at the link's full rate, kernels reach it in place."""

    name = "mapped"
    devices = ("cuda",)
    away = "host"
    paged = True
    granule = GRANULE
    ways = ("staged", "in_place")

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        """Needs host pages in virtual ranges, of a size that fits ours."""
        if not driver.capabilities(device.index).host_pages:
            return (
                "it cannot map host pages into a virtual range, which takes a driver of CUDA 13 or newer (update an "
                "older one)"
            )
        for where in Location:
            if cls.granule % (size := virtual.granule(where, device.index)):
                return f"its pages at {where.value} are of {size:,} bytes"
        return ""

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, resident)
        self._index: int = device.index
        self._check_room(resident, layout.pages)
        with Uninterrupted():
            self._range = virtual.Range(max(layout.nbytes, self.granule), self._index)
        for page in range(layout.pages):
            where = Location.DEVICE if page < resident else Location.HOST
            for offset, nbytes in layout.stretches(page, page + 1):
                with driver.explained(self._index, nbytes, where), Uninterrupted():
                    self._range.give(offset, nbytes, where)
        self.tensor = self._range.tensor()[: layout.nbytes] if layout.pages else torch.empty(
            0, dtype=torch.uint8, device=device
        )  # fmt: skip
        self.tensor.zero_()

    def move(self, resident: int) -> None:
        """Page by page, each at its own address; waits for the device first."""
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if resident < self.resident:
            self._check_room(resident, self.resident)
        where = Location.DEVICE if resident > self.resident else Location.HOST
        step = 1 if resident > self.resident else -1
        while self.resident != resident:
            page = self.resident if step > 0 else self.resident - 1
            stretches = self.layout.stretches(page, page + 1)
            with driver.explained(self._index, sum(n for _, n in stretches), where), Uninterrupted():
                before = self._range.move([offset for offset, _ in stretches], where, stream)
                self.resident += step
                virtual.release(before)

    def measured(self) -> dict[str, int]:
        """What the physical handles that are mapped add up to."""
        return {"device": self._range.bytes_at(Location.DEVICE), "host": self._range.bytes_at(Location.HOST)}

    def _check_room(self, first: int, last: int) -> None:
        nbytes = sum(n for _, n in self.layout.stretches(first, last))
        if nbytes:
            check_host(nbytes, "page-locked optimizer state")
