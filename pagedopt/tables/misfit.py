"""Whether a tensor is what is asked for, and if not, why: one answer for tables, steps and loads."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from .columns import has_memory
from .shards import local, placed_alike, placement_of


class Misfit(NamedTuple):
    """Why a tensor is not what is asked for.

    Attributes:
        aspect: what does not fit; callers choose an exception by it.
        why: the rest of a sentence that begins with the tensor's name.
    """

    aspect: Literal["type", "shape", "placement", "device", "dtype", "expanded", "memory"]
    why: str


def misfit(
    value: object,
    shape: torch.Size,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    of: str = "the parameter",
    shaped_by: str = "",
    placed: torch.Tensor | None = None,
    memory: bool = True,
) -> Misfit | None:
    """Return why a value is no dense tensor that is as asked; None: it is.

    Args:
        value: the value.
        shape: of the tensor; of a DTensor, of all of it.
        dtype, device: of the tensor; None: any.
        of, shaped_by: who asks for it, and for its shape if that is another, for the text.
        placed: a tensor that is a DTensor if this is one, placed as it is; None: any.
        memory: whether each of its elements needs memory of its own.
    """
    if not isinstance(value, torch.Tensor):
        return Misfit("type", f"is {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided:
        return Misfit("type", f"is sparse ({value.layout}); only dense tensors are supported")
    if value.shape != shape:
        return Misfit("shape", f"has shape {tuple(value.shape)}, {shaped_by or of} has {tuple(shape)}")
    if placed is not None and not placed_alike(value, placed):
        return Misfit("placement", f"is {placement_of(value)}, {of} is {placement_of(placed)}")
    if device is not None and value.device != device:
        return Misfit("device", f"is on {value.device}, {of} is on {device}: they must be on the same device")
    if dtype is not None and value.dtype is not dtype:
        return Misfit("dtype", f"is {value.dtype}; it should be {dtype}")
    if memory:
        return _without_memory(local(value))
    return None


def _without_memory(tensor: torch.Tensor) -> Misfit | None:
    if tensor.is_contiguous():  # the usual case, in few calls
        reach = tensor.storage_offset() + tensor.numel()
        if reach * tensor.itemsize <= tensor.untyped_storage().nbytes():
            return None
    if is_expanded(tensor):
        return Misfit("expanded", "is expanded: several of its elements are one in memory, and cannot be updated")
    if not has_memory(tensor):
        return Misfit("memory", "has no memory for all of it: its storage was freed or resized")
    return None


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements along a dimension are one in memory."""
    if tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
