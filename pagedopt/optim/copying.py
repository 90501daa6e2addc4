"""State that changes its place: home after users put it elsewhere, and into the copy of an optimizer."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch

from ..placements.store import Store
from ..system.interrupts import Uninterrupted
from ..tables.shards import placed_alike
from .kept import Kept, kept
from .loading.load import copy_values
from .members import state_tensors
from .owner import Owner, places

Kind = TypeVar("Kind", bound=Owner)


def bring_home(optimizer: Owner, store: Store) -> None:
    """Move state that lies elsewhere to where the placement has it.

    Each old tensor goes when its new one is filled, and an arena with the last of its tensors.

    Raises:
        MemoryError, torch.OutOfMemoryError, CudaError: there is no room; what has not come yet stays where it is.
    """
    away = [
        (of.wanted(p, key, tensor.dtype), tensor)
        for p, tensors in _whole_state(optimizer).items()
        if not all(store.is_home(tensor) for _, tensor in tensors.values())
        for key, (of, tensor) in tensors.items()
    ]
    if not away:
        return
    made = store.create([wanted for wanted, _ in away])
    for ((p, name, *_), _), tensor in zip(away, made, strict=True):
        with Uninterrupted():
            copy_values([(tensor, optimizer.state[p][name])], store, torch.empty(0, device="cpu"))
            optimizer.state[p][name] = tensor
    store.forget(state_tensors(optimizer))


def _whole_state(optimizer: Owner) -> dict[torch.Tensor, dict[str, tuple[Kept, torch.Tensor]]]:
    """The state of every parameter that has all its tensors, in their shapes and on its device, column by column."""
    found = {}
    for _, group, p in places(optimizer):
        if not (entry := optimizer.state.get(p)):
            continue
        columns = kept(optimizer, optimizer.state_names(group), p)
        tensors = {key: (of, t) for key, of in columns.items() if _fits(t := entry.get(key), p, of)}
        if columns and len(tensors) == len(columns):
            found[p] = tensors
    return found


def _fits(tensor: Any, p: torch.Tensor, of: Kept) -> bool:
    if not isinstance(tensor, torch.Tensor) or not placed_alike(tensor, p):
        return False
    return tensor.device == p.device and tensor.shape == of.column.shape(p)


def duplicate(optimizer: Kind, memo: dict[int, Any]) -> Kind:
    """A deep copy, whose state is where its own placement has it from the start: there is one copy, not two.

    Raises:
        MemoryError, torch.OutOfMemoryError, CudaError: there is no room.
    """
    twin = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = twin
    content = optimizer.__getstate__()
    state = content.pop("state")
    empty = copy.copy(state)
    empty.clear()
    twin.__setstate__({**copy.deepcopy(content, memo), "state": empty})
    ours = [
        (of.wanted(copy.deepcopy(p, memo), key, tensor.dtype), tensor)
        for p, tensors in _whole_state(optimizer).items()
        if not any(optimizer.store.is_plain(t) for _, t in tensors.values())
        for key, (of, tensor) in tensors.items()
    ]
    made = twin.store.create([wanted for wanted, _ in ours]) if ours else []
    memo.update((id(tensor), new) for (_, tensor), new in zip(ours, made, strict=True))
    copy_values(
        [(new, old) for (_, old), new in zip(ours, made, strict=True)], twin.store, torch.empty(0, device="cpu")
    )
    twin.state.update((copy.deepcopy(p, memo), copy.deepcopy(entry, memo)) for p, entry in state.items())
    return twin
