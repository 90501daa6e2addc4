"""Managed memory (``cudaMallocManaged``): divided by advice, or left to the driver."""

from __future__ import annotations

import contextlib

import torch

from ..paging.pages import GRANULE, Layout
from ..system.cuda import driver
from ..system.cuda.driver import Advice, Location
from ..system.files.host import check_host, resident_bytes
from ..system.interrupts import Uninterrupted
from .arena import Arena


class ManagedArena(Arena):
    """Each part prefers its own side; the device reads and writes the host part in place, over the link.

    With a preferred location nothing migrates on touch, so a step costs the same every time.  Copy engines do not
    help: managed memory is not page-locked.
    """

    name = "managed"
    devices = ("cuda",)
    away = "host"
    paged = True
    granule = GRANULE

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        """The host part must be readable while kernels run."""
        can = driver.capabilities(device.index)
        if not (can.managed and can.concurrent_managed):
            return "it has no concurrent managed access (concurrentManagedAccess = 0)"
        return ""

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, resident)
        self._index: int = device.index
        away = sum(n for _, n in layout.stretches(resident, layout.pages))
        if away:
            check_host(away, "optimizer state")
        with Uninterrupted():
            buffer = driver.allocate_managed(max(layout.nbytes, 1), self._index)
        self.tensor = driver.as_tensor(buffer)[: layout.nbytes]
        self._settle(Location.DEVICE, 0, resident)
        self._settle(Location.HOST, resident, layout.pages)
        torch.cuda.current_stream(device).synchronize()
        for offset, nbytes in layout.stretches(0, resident):
            self.tensor[offset : offset + nbytes].zero_()
        for offset, nbytes in layout.stretches(resident, layout.pages):
            buffer.host[offset : offset + nbytes] = 0  # where it lies, and not over the link

    def move(self, resident: int) -> None:
        """Advise and prefetch the pages between the old boundary and the new; if that fails, back again."""
        torch.cuda.synchronize(self.device)
        first, last = sorted((resident, self.resident))
        away = resident < self.resident
        there, back = (Location.HOST, Location.DEVICE) if away else (Location.DEVICE, Location.HOST)
        if away:
            check_host(sum(n for _, n in self.layout.stretches(first, last)), "optimizer state")
        with Uninterrupted(), contextlib.ExitStack() as undo:
            undo.callback(self._settle, back, first, last)
            self._settle(there, first, last)
            torch.cuda.current_stream(self.device).synchronize()
            self.resident = resident
            undo.pop_all()

    def measured(self) -> dict[str, int]:
        """The operating system knows which of the pages are in host memory; the rest is on the device."""
        host = resident_bytes(self.tensor.data_ptr(), self.layout.nbytes)
        return {"device": self.layout.nbytes - host, "host": host}

    def _settle(self, where: Location, first: int, last: int) -> None:
        """Let pages live at ``where`` from now on, in stream order."""
        with torch.cuda.device(self._index):
            stream = torch.cuda.current_stream().cuda_stream
            for offset, nbytes in self.layout.stretches(first, last):
                address = self.tensor.data_ptr() + offset
                driver.advise(address, nbytes, Advice.PREFERRED, where, self._index)
                driver.advise(address, nbytes, Advice.ACCESSED_BY, Location.DEVICE, self._index)
                driver.prefetch(address, nbytes, where, self._index, stream)


class DriverManagedArena(ManagedArena):
    """As in Dettmers' scheme (bitsandbytes): no advice, everything prefetched before use, the driver evicts.

    ``move`` pushes pages out once; the next step fetches them again.
    """

    name = "managed-driver"
    keeps_budget = False

    def prepare(self) -> None:
        """Prefetch what was pushed out, or may have been: the driver knows what is there already."""
        self._settle(Location.DEVICE, 0, self.layout.pages)
        self.resident = self.layout.pages

    def _settle(self, where: Location, first: int, last: int) -> None:
        with torch.cuda.device(self._index):
            stream = torch.cuda.current_stream().cuda_stream
            for offset, nbytes in self.layout.stretches(first, last):
                if nbytes:
                    driver.prefetch(self.tensor.data_ptr() + offset, nbytes, where, self._index, stream)
