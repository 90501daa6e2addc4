"""Room for the occasional step that needs more memory than the others: the reason QLoRA wanted paged optimizers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from ..base import PagedOptimizer
from ..out_of_memory import advise, is_out_of_memory

Result = TypeVar("Result")


def run_with_room(optimizer: PagedOptimizer, function: Callable[[], Result], nbytes: int | str | None = None) -> Result:
    """Run ``function``; if memory runs out, give it the room of the optimizer's state and run it again.

    The room is taken back when the second run has ended; what is not free then, at the beginning of the next calls.

    Args:
        optimizer: whose state may be spilled.
        function: one that may be run twice: typically zero_grad, forward and backward of a batch.
        nbytes: how much to spill; None: all.

    Returns:
        what ``function`` returns.

    Raises:
        torch.OutOfMemoryError: the room was not enough, or there was none to give, which a note says then.  On a CPU
            MemoryError, or the RuntimeError of torch's allocator.

    Example:
        >>> loss = run_with_room(optimizer, lambda: forward_backward(batch))
        >>> optimizer.step()
    """
    _take_back(optimizer)
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failure = error.with_traceback(None)  # whose frames hold what the first run had allocated
    gc.collect()
    torch.cuda.empty_cache()
    try:
        given = optimizer.spill(nbytes)
    except MemoryError as error:  # the host's, where the device's is what the user knows and may wait for
        advise(failure, optimizer, f"run_with_room could not spill, as the host has no room ({error}): ")
        raise failure from error
    if not given:
        advise(failure, optimizer, "run_with_room found no state that it could spill: ")
        raise failure
    try:
        return function()
    finally:
        _take_back(optimizer)


def _take_back(optimizer: PagedOptimizer) -> None:
    """Undo a spill as far as there is room: what torch cached for the large run may lie in the way for a while."""
    if optimizer.store.is_spilled():
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError, MemoryError):  # the next call tries again
            optimizer.unspill()
