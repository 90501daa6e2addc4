"""Creating optimizer state: tensors that view the arenas of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..formats import state_dtype
from ..pointers import is_dense
from ..store import Store, Wanted

if TYPE_CHECKING:
    from .base import PagedOptimizer


def create_state(optimizer: PagedOptimizer, memory: Store) -> tuple[list[torch.Tensor], set[int]]:
    """Give zeroed state to every parameter that has a gradient and none yet.

    Returns:
        the parameters that still have neither, and the ids of those that take their first step now.
    """
    wanted: list[Wanted] = []
    waiting: list[torch.Tensor] = []
    fresh: set[int] = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None and p not in optimizer.state:
                waiting.append(p)
                continue
            missing = [name for name in optimizer.state_names(group) if optimizer.state.get(p, {}).get(name) is None]
            if missing or p not in optimizer.state:
                fresh.add(id(p))
            wanted += [(p, name, state_dtype(optimizer.state_format, name, p.dtype)) for name in missing]
    _check(optimizer)
    memory.forget(state_tensors(optimizer))
    for (p, name, _), tensor in zip(wanted, memory.create(wanted) if wanted else (), strict=True):
        if optimizer.has_step:
            optimizer.state[p].setdefault("step", torch.zeros(()))  # first, as torch has it; buckets put theirs here
        optimizer.state[p][name] = tensor
    return waiting, fresh


def state_tensors(optimizer: PagedOptimizer) -> list[torch.Tensor]:
    """Every tensor of state that the rules name."""
    return [
        value
        for group in optimizer.param_groups
        for p in group["params"]
        for name in optimizer.state_names(group)
        if isinstance(value := optimizer.state.get(p, {}).get(name), torch.Tensor)
    ]


def _check(optimizer: PagedOptimizer) -> None:
    index = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not is_dense(p):
                raise ValueError(
                    f"parameter {index} of shape {tuple(p.shape)} and strides {p.stride()} has gaps or overlaps "
                    "itself; use a contiguous tensor"
                )
            index += 1
