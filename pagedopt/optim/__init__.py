"""Optimizers: ``torch.optim.Optimizer`` front ends to one launch over one pointer list."""

from ..placements.store import MemoryReport
from .adamw import PagedAdamW
from .base import PagedOptimizer
from .room import run_with_room
from .sgd import PagedSGD

__all__ = ["MemoryReport", "PagedAdamW", "PagedOptimizer", "PagedSGD", "run_with_room"]
