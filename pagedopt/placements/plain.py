"""Arenas of one kind of memory, whose pages do not move."""

from __future__ import annotations

import torch

from ..paging.pages import Layout
from ..system.cuda import driver
from ..system.files.host import check_host
from .arena import Arena


class DeviceArena(Arena):
    """Ordinary memory of the parameters' own device.  No arena is made: each state is a tensor of torch's own."""

    name = "device"
    plain = True


class HostArena(DeviceArena):
    """Ordinary memory of the host, for parameters on a CPU."""

    name = "host"
    devices = ("cpu",)


class PinnedArena(Arena):
    """Page-locked host memory alone, for systems on which nothing else can be divided."""

    name = "host"
    devices = ("cuda",)
    away = "host"
    granule = 4096
    ways = ("staged", "in_place")

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        """It is read through an address of the device."""
        if not driver.capabilities(device.index).mapped:
            return "it cannot map host memory (canMapHostMemory = 0)"
        return ""

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, 0)
        check_host(layout.nbytes, "page-locked optimizer state")
        buffer = driver.allocate_mapped(max(layout.nbytes, 1), device.index)
        buffer.host[:] = 0
        self.tensor = driver.as_tensor(buffer)[: layout.nbytes]
