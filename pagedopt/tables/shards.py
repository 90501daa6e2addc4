"""What this process has of a tensor: all of it, or its own shard of a ``DTensor``, which several processes have.

Kernels see shards alone; state is a DTensor again, placed as its parameter, so that checkpoints know whose part it is.
Nothing here loads ``torch.distributed.tensor``: where nobody has, there are no DTensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..system.internals import shard_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor, however it is placed."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard that this process has of a DTensor, in its own memory; any other tensor itself."""
    return tensor if type(tensor) in _PLAIN or not is_sharded(tensor) else shard_of(tensor)


def like_shard(shard: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """``shard`` as a tensor of the same kind as ``of``, whose own shard has its shape: a DTensor, if that is one."""
    if not is_sharded(of):
        return shard
    whole: Any = of
    if shard.device.type != whole.device_mesh.device_type:  # offloaded; from_local() would bring it to the device
        made: Any = torch.empty_like(whole, dtype=shard.dtype, requires_grad=False)
        local(made).data = shard
        return made
    return type(whole).from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.size(), stride=whole.stride()
    )


def placed_alike(tensor: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether both are DTensors over the same processes in the same placements, or neither is one."""
    if type(tensor) in _PLAIN and type(p) in _PLAIN:
        return True
    if not (is_sharded(tensor) and is_sharded(p)):
        return not (is_sharded(tensor) or is_sharded(p))
    one: Any = tensor
    other: Any = p
    return one.placements == other.placements and one.device_mesh == other.device_mesh


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether a tensor is but this process's share of a sum (or another reduction) that has not been made yet."""
    whole: Any = tensor
    return is_sharded(tensor) and any(placement.is_partial() for placement in whole.placements)


def placement_of(tensor: object) -> str:
    """In words."""
    whole: Any = tensor
    return f"a DTensor of {whole.placements} over {whole.device_mesh}" if is_sharded(tensor) else "no DTensor"


def local_grad(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a DTensor's shard.  What is placed otherwise than the parameter (as sums that are still to be
    made) is placed as the parameter first, which all its processes do together.

    Raises:
        RuntimeError: the gradient is no DTensor (as torch).
    """
    grad: Any = p.grad
    if grad is None:
        return None
    if not is_sharded(grad):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} is {placement_of(p)}, its gradient none, but a plain tensor of "
            f"shape {tuple(grad.shape)}; use DTensor.from_local() or distribute_tensor()"
        )
    if not placed_alike(grad, p):
        whole: Any = p
        grad = grad.detach().redistribute(whole.device_mesh, whole.placements)
    return local(grad)
