"""Placements whose pages do not move: ``device``, and ``host`` for parameters on a CPU or a GPU."""

from __future__ import annotations

import torch

from ..paging.pages import Layout
from ..system import driver
from ..system.host import check_host
from .arena import Arena


class DeviceArena(Arena):
    """Ordinary memory of the parameters' own device.  No arena is made: each state tensor is allocated by torch."""

    name = "device"
    plain = True


class HostArena(DeviceArena):
    """Ordinary memory of the host, for parameters on a CPU."""

    name = "host"
    devices = ("cpu",)


class PinnedArena(Arena):
    """Pinned host memory alone, for systems on which no placement can be divided."""

    name = "host"
    devices = ("cuda",)
    away = "host"
    granule = 4096
    ways = ("staged", "in_place")

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        """Refuse devices that cannot map host memory: kernels read it through a device address."""
        if not driver.capabilities(device.index).mapped:
            return "it cannot map host memory (canMapHostMemory = 0)"
        return ""

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, 0)
        check_host(layout.nbytes, "page-locked optimizer state")
        buffer = driver.allocate_mapped(max(layout.nbytes, 1), device.index)
        buffer.host[:] = 0
        self.tensor = driver.as_tensor(buffer)[: layout.nbytes]
