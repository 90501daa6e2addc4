"""Optimizers: ``torch.optim.Optimizer`` front ends to one launch over one pointer list."""

from .adamw import PagedAdamW
from .base import MemoryReport, PagedOptimizer
from .sgd import PagedSGD

__all__ = ["MemoryReport", "PagedAdamW", "PagedOptimizer", "PagedSGD"]
