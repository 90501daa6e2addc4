"""Recognize out-of-memory errors, of a device or the host, and add advice to them."""

from __future__ import annotations

import contextlib

import torch

from .state.rule_optimizer import RuleOptimizer, state_tensors

#: Part of the message of the RuntimeError that torch's CPU allocator raises.
HOST_IS_FULL = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory of a device or of the host ran out."""
    host = isinstance(error, RuntimeError) and HOST_IS_FULL in str(error)
    return host or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def advise(error: BaseException, optimizer: RuleOptimizer, before: str = "") -> None:
    """Add a note to ``error``: ``before``, then the bytes of state, and what a smaller budget frees and costs."""
    with contextlib.suppress(Exception):  # a failure here must not replace the error that the user has to see
        from .step.budget_advice import advice

        error.add_note(before + advice(optimizer, optimizer.store.report(state_tensors(optimizer)).by_place))


__all__ = ["advise", "is_out_of_memory"]
