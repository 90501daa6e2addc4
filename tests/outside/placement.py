"""Placements of one's own: arenas that count and refuse beyond a limit, as a small card does; and plain memory."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch

from pagedopt.placements import Arena, FileArena, Layout, MappedArena


class Limited(Arena):
    """All arenas of subclasses together have at most ``room`` bytes of resident pages."""

    room: ClassVar[int] = 64 << 20
    made: ClassVar[weakref.WeakSet[Arena]] = weakref.WeakSet()

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        self.take(layout.divided(resident)[0])
        super().__init__(layout, device, resident)
        self.made.add(self)

    def move(self, resident: int) -> None:
        self.take(self.layout.divided(resident)[0] - self.layout.divided(self.resident)[0])
        super().move(resident)

    @classmethod
    def take(cls, nbytes: int) -> None:
        left = cls.room - sum(a.layout.divided(a.resident)[0] for a in cls.made if isinstance(a, cls))
        if nbytes > left:
            raise MemoryError(f"{nbytes:,} bytes of state, where {left:,} are left; give a smaller device_budget")


class SmallRam(Limited, FileArena):
    name = "small"


class SmallCard(Limited, MappedArena):
    pass


class Ordinary(Arena):
    """Ordinary memory in one range, for parameters on a CPU."""

    name = "ordinary"
    devices = ("cpu",)

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, resident)
        self.tensor = torch.zeros(layout.nbytes, dtype=torch.uint8)
