"""The optimizers: ``torch.optim.Optimizer`` subclasses that update many tensors in one kernel launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.names import attach
from .registry import OPTIMIZERS

if TYPE_CHECKING:
    from ..placements.memory_report import MemoryReport as MemoryReport
    from .optimizer import PagedOptimizer as PagedOptimizer
    from .registry import *  # noqa: F403
    from .with_room import run_with_room as run_with_room
else:  # type checkers must not see this __getattr__: they would accept any name
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "..placements.memory_report": ("MemoryReport",),
            ".optimizer": ("PagedOptimizer",),
            ".with_room": ("run_with_room",),
            **{f".{entry.module}": (entry.name,) for entry in OPTIMIZERS},
        },
    )
