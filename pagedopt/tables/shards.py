"""This process's part of a tensor: the shard of a ``DTensor``, or all of any other tensor.

Kernels see only shards.  State is a DTensor placed like its parameter, so that checkpoints know which part it is.
Nothing here imports ``torch.distributed.tensor``: while it is not loaded, there are no DTensors.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch

from ..system.internals import shard_of

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
