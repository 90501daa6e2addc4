"""What a tensor is for a table: its memory and strides, this process's part of it, and whether it is as asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from ..system.internals import shard_of

TensorList = Sequence[torch.Tensor | None]
Tensors = tuple[torch.Tensor | None, ...]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage is as large as sizes and strides ask for: it may have been resized or freed."""
    if not (reach := tensor.numel()):
        return True
    if not tensor.is_contiguous():
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + reach) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is one of ``FakeTensorMode``, which claims a device and has no memory there."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # while it is not loaded, there are no fake tensors
    return module is not None and isinstance(tensor, module.FakeTensor)


def widest_first(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by falling stride: permuted so, a dense tensor is contiguous."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is dense; else a meta tensor with the strides of ``torch.empty_like``."""
    return tensor if is_dense(tensor) else torch.empty_like(tensor, device="meta", requires_grad=False)


def same_layout(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether two strides address the same elements: those of dimensions of size one do not count."""
    return a == b or all(x == y for x, y, size in zip(a, b, shape, strict=True) if size != 1)


_BASE_CLASSES = (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: object) -> TypeGuard[Any]:
    """Return whether ``tensor`` is a DTensor, in any placement."""
    if type(tensor) in _BASE_CLASSES:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor if type(tensor) in _BASE_CLASSES or not is_sharded(tensor) else shard_of(tensor)


def like_shard(shard: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return a DTensor placed like ``of`` whose local shard is ``shard``; ``shard`` itself if ``of`` is none."""
    if not is_sharded(of):
        return shard
    if shard.device.type != of.device_mesh.device_type:  # offloaded: from_local() would copy it to the device
        made = torch.empty_like(of, dtype=shard.dtype, requires_grad=False)
        local(made).data = shard
        return made
    return type(of).from_local(
        shard, of.device_mesh, of.placements, run_check=False, shape=of.size(), stride=of.stride()
    )


def placed_alike(tensor: torch.Tensor, p: torch.Tensor) -> bool:
    """Return whether both are DTensors on the same mesh with the same placements, or neither is one."""
    if type(tensor) in _BASE_CLASSES and type(p) in _BASE_CLASSES:
        return True
    if is_sharded(tensor) and is_sharded(p):
        return tensor.placements == p.placements and tensor.device_mesh == p.device_mesh
    return not (is_sharded(tensor) or is_sharded(p))


def is_partial(tensor: torch.Tensor) -> bool:
    """Return whether a DTensor holds this process's term of a sum (or other reduction) that is still to be made."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)


def first_element(tensor: torch.Tensor) -> int | None:
    """Return where in the whole tensor this process's part begins; None: its elements do not follow each other there.

    They do in what is replicated, and in contiguous parts that are sharded once, by their first dimension.
    """
    if not is_sharded(tensor):
        return 0
    shards = [(i, placement) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not shards:
        return 0
    (i, placement), *others = shards
    plain = type(placement) is sys.modules["torch.distributed.tensor"].Shard and placement.dim == 0
    if others or not plain or not local(tensor).is_contiguous():
        return None
    rows = -(-tensor.shape[0] // tensor.device_mesh.size(i)) * tensor.device_mesh.get_local_rank(i)
    return int(min(rows, tensor.shape[0]) * tensor.shape[1:].numel())


def placement_of(tensor: object) -> str:
    """Return a DTensor's placements (torch's word) and mesh as text; "no DTensor" for other tensors."""
    return f"a DTensor of {tensor.placements} over {tensor.device_mesh}" if is_sharded(tensor) else "no DTensor"


def local_grad(p: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this process's shard of the DTensor ``p``; RuntimeError (as torch) if it is no DTensor."""
    grad: Any = p.grad
    if grad is None:
        return None
    if not is_sharded(grad):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} is {placement_of(p)}, its gradient none, but an ordinary tensor of "
            f"shape {tuple(grad.shape)}; use DTensor.from_local() or distribute_tensor()"
        )
    if not placed_alike(grad, p):  # e.g. partial sums: redistribute them, a collective operation
        whole: Any = p
        grad = grad.detach().redistribute(whole.device_mesh, whole.placements)
    return local(grad)


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
