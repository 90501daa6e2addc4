"""Spill state for the occasional step that needs more memory than the others (QLoRA's use of paged optimizers)."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from ..common.names import kind_of
from ..common.units import text_of_bytes
from ..tables.tensors import local
from .optimizer import PagedOptimizer
from .room import advise, is_out_of_memory

Result = TypeVar("Result")


class Gradient:
    """The gradient that a parameter has before a run.

    Args:
        copied: copy it to the host, and keep it alive; else ``zero_grad()`` in the run frees it.
    """

    def __init__(self, param: torch.Tensor, copied: bool) -> None:
        grad = param.grad
        self.param = param
        self.memory = None if grad is None else weakref.ref(_memory_of(grad))
        self.version = None if grad is None else _version(grad)
        self.copied = None if grad is None or not copied else (grad, local(grad).detach().to("cpu", copy=True))

    @property
    def written(self) -> bool:
        """Whether the parameter has a gradient in the same memory with other values."""
        now = self.param.grad
        if now is None or self.memory is None or _memory_of(now) is not self.memory():
            return False
        return _version(now) != self.version

    def put_back(self) -> None:
        """Let the parameter have no gradient if it had none; else put back what was copied."""
        if self.memory is None:
            self.param.grad = None
        elif self.copied is not None:
            grad, values = self.copied
            with torch.no_grad():
                local(grad).copy_(values)
            self.param.grad = grad


def _memory_of(grad: torch.Tensor) -> torch.UntypedStorage | torch.Tensor:
    """Return the storage, as ``torch.utils.swap_tensors`` refuses tensors with weak references; itself if sparse."""
    shard = local(grad)
    return shard.untyped_storage() if shard.layout is torch.strided else grad


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # inference tensors have no counter


def run_with_room(
    optimizer: PagedOptimizer, function: Callable[[], Result], nbytes: int | str | None = None, *, restore: bool = False
) -> Result:
    """Run ``function``; if memory runs out, spill the optimizer's state and run it again.

    The state comes back after the second run.  If there is not enough room yet, the next calls try again first.

    The second run must not add to what the first has left in gradients.  So the function should begin with
    ``optimizer.zero_grad()``.  Of the optimizer's parameters, those that had no gradient have none again before the
    second run.  If the first run has written to a gradient in place (also ``zero_grad(set_to_none=False)``), the error
    rises without a second run, unless ``restore`` is given.  A gradient that was replaced stays: by ``zero_grad()``, or
    by a backward pass with ``create_graph=True``, which adds to it nevertheless.

    All else is as the first run has left it: random number generators (a second run draws another dropout mask),
    buffers (the running mean of a batch norm takes the batch twice), and gradients of parameters that the optimizer
    does not have.

    Args:
        optimizer: whose state may be spilled.
        function: one that may be run twice: typically zero_grad, forward and backward of a batch.
        nbytes: how much to spill, a number or a text (``"2GiB"``); None: all.
        restore: copy all gradients to the host before the first run, and back before the second, for a function that
            adds to gradients, such as one of several batches of a step.  The host needs room for as many bytes.

    Returns:
        what ``function`` returns.

    Raises:
        TypeError: the optimizer is none of pagedopt, or the function cannot be called.
        torch.OutOfMemoryError: the room was not enough, nothing could be spilled, or a gradient was written to (a note
            says so).  On a CPU MemoryError, or the RuntimeError of torch's allocator.
        MemoryError: with ``restore``, the host has no room for the gradients; the function has not been run.

    Example:
        >>> def forward_backward():
        ...     optimizer.zero_grad()
        ...     loss = model(batch).mean()
        ...     loss.backward()
        ...     return loss.detach()
        >>> loss = run_with_room(optimizer, forward_backward)
        >>> optimizer.step()
    """
    if not isinstance(optimizer, PagedOptimizer):
        what = f"run_with_room(optimizer, function): the optimizer is {kind_of(optimizer)}"
        if isinstance(function, PagedOptimizer):
            raise TypeError(f"{what} and the function {kind_of(function)}; give the optimizer first")
        raise TypeError(f"{what}, whose state cannot be spilled; give one of pagedopt, as PagedAdamW")
    if not callable(function):
        raise TypeError(f"run_with_room(optimizer, function): the function is {function!r}; give one without arguments")
    _take_back(optimizer)
    params = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    gradients = [Gradient(p, copied=restore) for p in params]
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failure = error.with_traceback(None)  # the frames of the traceback keep the first run's tensors alive
    if not restore and (written := [g for g in gradients if g.written]):
        size = sum(p.grad.numel() * p.grad.itemsize for p in params if p.grad is not None)
        failure.add_note(
            f"run_with_room did not run the function again: its first run has written to {len(written)} of "
            f"{len(gradients)} gradients in place, and a second would add to them. Begin the function with "
            f"optimizer.zero_grad(), or give restore=True, which copies gradients ({text_of_bytes(size)}) to the host "
            "before the first run and back before the second"
        )
        raise failure
    for gradient in gradients:
        gradient.put_back()
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
