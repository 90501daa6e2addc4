"""Errors that say that memory is full, whoever raises them, and the note that they get."""

from __future__ import annotations

import contextlib

import torch

from .state.rule_optimizer import RuleOptimizer
from .step.members import state_tensors

#: With what torch's allocator says that the host has no memory: a plain RuntimeError.
HOST_IS_FULL = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a device or of the host was not enough."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and HOST_IS_FULL in str(error)


def advise(error: BaseException, optimizer: RuleOptimizer, before: str = "") -> None:
    """Add a note: what state holds, and what a smaller budget frees and costs; ``before`` it, something else."""
    with contextlib.suppress(Exception):  # whatever goes wrong here, the error is the other one
        from .step.budget_advice import advice

        error.add_note(before + advice(optimizer, optimizer.store.report(state_tensors(optimizer)).by_place))


__all__ = ["advise", "is_out_of_memory"]
