"""Optimizers: ``torch.optim.Optimizer`` front ends to one launch over one pointer list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy import attach
from .registry import OPTIMIZERS

if TYPE_CHECKING:
    from ..placements.report import MemoryReport as MemoryReport
    from .base import PagedOptimizer as PagedOptimizer
    from .registry import *  # noqa: F403
    from .tools.beside import Shadow as Shadow
    from .tools.beside import shadow as shadow
    from .tools.room import run_with_room as run_with_room
else:  # a type checker would take any name for one of these
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "..placements.report": ("MemoryReport",),
            ".base": ("PagedOptimizer",),
            ".tools.beside": ("Shadow", "shadow"),
            ".tools.room": ("run_with_room",),
            **{f".{entry.module}": (entry.name,) for entry in OPTIMIZERS},
        },
    )
