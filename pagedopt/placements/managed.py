"""The placements ``managed`` and ``managed-driver``: managed memory (``cudaMallocManaged``)."""

from __future__ import annotations

import contextlib

import torch

from ..paging.pages import GRANULE, Layout
from ..system import driver
from ..system.driver import Advice, Location
from ..system.host import check_host, resident_bytes
from ..system.interrupts import Uninterrupted
from .arena import Arena


class ManagedArena(Arena):
    """Managed memory divided by advice; the device reads and writes the host part in place, over the link.

    Pages with a preferred location do not migrate on touch, so a step costs the same every time.  Copy engines do not
    help: managed memory is not page-locked.
    """

    name = "managed"
    devices = ("cuda",)
    away = "host"
    paged = True
    granule = GRANULE

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        """Refuse devices that cannot read the host part while kernels run."""
        can = driver.capabilities(device.index)
        if not (can.managed and can.concurrent_managed):
            return "it has no concurrent managed access (concurrentManagedAccess = 0)"
        return ""

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, resident)
        check_host(layout.divided(resident)[1], "optimizer state")
        with Uninterrupted():
            buffer = driver.allocate_managed(max(layout.nbytes, 1), device.index)
        self.tensor = driver.as_tensor(buffer)[: layout.nbytes]
        self._migrate(Location.DEVICE, 0, resident)
        self._migrate(Location.HOST, resident, layout.pages)
        torch.cuda.current_stream(device).synchronize()
        for offset, nbytes in layout.stretches(0, resident):
            self.tensor[offset : offset + nbytes].zero_()
        for offset, nbytes in layout.stretches(resident, layout.pages):
            buffer.host[offset : offset + nbytes] = 0  # by the CPU: the device would write over the link

    def move(self, resident: int) -> None:
        """Advise and prefetch the pages between the old boundary and the new one; if that fails, undo it."""
        torch.cuda.synchronize(self.device)
        first, last = sorted((resident, self.resident))
        there, back = Location.DEVICE, Location.HOST
        if resident < self.resident:
            there, back = back, there
            check_host(sum(n for _, n in self.layout.stretches(first, last)), "optimizer state")
        with Uninterrupted(), contextlib.ExitStack() as undo:
            undo.callback(self._migrate, back, first, last)
            self._migrate(there, first, last)
            torch.cuda.current_stream(self.device).synchronize()
            self.resident = resident
            undo.pop_all()

    def measured(self) -> dict[str, int]:
        """Return bytes in host memory, as the operating system says; all others are on the device."""
        host = resident_bytes(self.tensor.data_ptr(), self.layout.nbytes)
        return {"device": self.layout.nbytes - host, "host": host}

    def _migrate(self, where: Location, first: int, last: int) -> None:
        """Prefetch pages to ``where`` in stream order, and advise the driver to leave them there."""
        with torch.cuda.device(self.device):
            stream, index = torch.cuda.current_stream().cuda_stream, self.device.index
            for offset, nbytes in self.layout.stretches(first, last):
                address = self.tensor.data_ptr() + offset
                if self.keeps_budget:
                    driver.advise(address, nbytes, Advice.PREFERRED, where, index)
                    driver.advise(address, nbytes, Advice.ACCESSED_BY, Location.DEVICE, index)
                driver.prefetch(address, nbytes, where, index, stream)


class DriverManagedArena(ManagedArena):
    """The scheme of Dettmers (bitsandbytes): no advice, everything is prefetched before use, the driver evicts.

    ``move`` pushes pages out once; the next step fetches them again.
    """

    name = "managed-driver"
    keeps_budget = False

    def prepare(self) -> None:
        """Prefetch all pages; for those already on the device the driver does nothing."""
        self._migrate(Location.DEVICE, 0, self.layout.pages)
        self.resident = self.layout.pages
