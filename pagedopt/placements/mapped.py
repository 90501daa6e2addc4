"""The placement ``mapped``: device pages and pinned host pages in one virtual address range.

We map the pages ourselves, so the driver never migrates them (no thrashing), and state may exceed device memory.
"""

from __future__ import annotations

import torch

from ..paging.pages import GRANULE, Layout
from ..system import driver, virtual
from ..system.driver import Location
from ..system.host import check_host
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
        """Refuse devices without host pages in virtual ranges, or whose page size does not divide ``granule``."""
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
        check_host(layout.divided(resident)[1], "page-locked optimizer state")
        with Uninterrupted():
            self._range = virtual.Range(max(layout.nbytes, self.granule), device.index)
        for page in range(layout.pages):
            where = Location.DEVICE if page < resident else Location.HOST
            for offset, nbytes in layout.stretches(page, page + 1):
                with driver.explained(device.index, nbytes, where), Uninterrupted():
                    self._range.give(offset, nbytes, where)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        self.tensor = self._range.tensor()[: layout.nbytes].zero_() if layout.pages else empty

    def move(self, resident: int) -> None:
        """Move page by page, each at its own address; waits for the device first."""
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        where, pages, added = Location.DEVICE, range(self.resident, resident), 1
        if resident < self.resident:
            where, pages, added = Location.HOST, range(resident, self.resident)[::-1], 0
            away = sum(n for _, n in self.layout.stretches(resident, self.resident))
            check_host(away, "page-locked optimizer state")
        for page in pages:
            stretches = self.layout.stretches(page, page + 1)
            with driver.explained(self.device.index, sum(n for _, n in stretches), where), Uninterrupted():
                before = self._range.move([offset for offset, _ in stretches], where, stream)
                self.resident = page + added
                virtual.release(before)

    def measured(self) -> dict[str, int]:
        """Return the bytes of the physical memory that is mapped."""
        return {"device": self._range.bytes_at(Location.DEVICE), "host": self._range.bytes_at(Location.HOST)}
