"""Spill state for the occasional step that needs more memory than the others (QLoRA's use of paged optimizers)."""

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
    """Run ``function``; if memory runs out, spill the optimizer's state and run it again.

    The state comes back after the second run.  If there is not enough room yet, the next calls try again first.

    Args:
        optimizer: whose state may be spilled.
        function: one that may be run twice: typically zero_grad, forward and backward of a batch.
        nbytes: how much to spill, a number or a text (``"2GiB"``); None: all.

    Returns:
        what ``function`` returns.

    Raises:
        TypeError: the optimizer is none of pagedopt, or the function cannot be called.
        torch.OutOfMemoryError: the room was not enough, or nothing could be spilled (a note says so).  On a CPU
            MemoryError, or the RuntimeError of torch's allocator.

    Example:
        >>> loss = run_with_room(optimizer, lambda: forward_backward(batch))
        >>> optimizer.step()
    """
    if not isinstance(optimizer, PagedOptimizer):
        what = f"run_with_room(optimizer, function): the optimizer is a {type(optimizer).__name__}"
        if isinstance(function, PagedOptimizer):
            raise TypeError(f"{what} and the function a {type(function).__name__}; give the optimizer first")
        raise TypeError(f"{what}, whose state cannot be spilled; give one of pagedopt, as PagedAdamW")
    if not callable(function):
        raise TypeError(f"run_with_room(optimizer, function): the function is {function!r}; give one without arguments")
    _take_back(optimizer)
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failure = error.with_traceback(None)  # the frames of the traceback keep the first run's tensors alive
    gc.collect()
    torch.cuda.empty_cache()
    try:
        given = optimizer.spill(nbytes)
    except MemoryError as error:  # the host's; callers expect the device's error
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
    """Undo a spill as far as there is room."""
    if optimizer.store.is_spilled():
        torch.cuda.empty_cache()  # memory that torch cached in the large run
        with contextlib.suppress(torch.OutOfMemoryError, MemoryError):  # the next call tries again
            optimizer.unspill()
