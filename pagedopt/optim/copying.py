"""State that changes its place: home after users put it elsewhere, and into the copy of an optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..placements import choose
from ..placements.arena import Arena
from ..placements.store import Store
from ..system.interrupts import Uninterrupted
from ..tables.shards import placed_alike
from .kept import Kept, kept
from .loading.load import copy_values
from .members import state_tensors
from .owner import Owner, places

Kind = TypeVar("Kind", bound=Owner)


def bring_home(optimizer: Owner, store: Store, on: Callable[[torch.device], bool] = lambda _: True) -> None:
    """Move state that lies elsewhere to where the placement has it.

    Each old tensor goes when its new one is filled, and an arena with the last of its tensors.

    Args:
        on: of which devices.

    Raises:
        MemoryError, torch.OutOfMemoryError, CudaError: there is no room; what has not come yet stays where it is.
    """
    away = [
        (of.wanted(p, key, tensor.dtype), tensor)
        for p, tensors in _whole_state(optimizer).items()
        if on(p.device) and not all(store.is_home(tensor) for _, tensor in tensors.values())
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


def into_pages(optimizer: Owner, store: Store, nbytes: int | None = None) -> int:
    """Send state away that nobody placed and that lies in torch's own tensors; returns the bytes given back.

    All of it goes into new tensors in pages that move, and what is more than ``nbytes`` (None: nothing is) comes back,
    as far as there is room.

    Raises:
        MemoryError, CudaError: the host has no room; what has not gone yet stays where it is.
    """

    def plain() -> int:
        return sum(t.nbytes for t in state_tensors(optimizer) if choose.moves_on_demand(t.device) and store.is_plain(t))

    if not store.is_unplaced() or not (before := plain()):
        return 0
    there = set(store.arenas)
    with store.all_away():
        bring_home(optimizer, store, choose.moves_on_demand)
    given = before - plain()
    torch.cuda.empty_cache()  # it is free for torch; pages and other processes need the driver to have it
    if nbytes is not None:
        for arena in (a for a in store.arenas if a.paged and a not in there):
            given -= _take_back(arena, given - nbytes)
    return given


def _take_back(arena: Arena, nbytes: int) -> int:
    """Bring pages that are away to the device, no more than so many bytes, if there is room; returns how many came."""
    first, sizes = arena.resident, arena.layout.page_bytes()
    last, left = first, nbytes
    while last < len(sizes) and int(sizes[last]) <= left:
        left -= int(sizes[last])
        last += 1
    with contextlib.suppress(torch.OutOfMemoryError):
        arena.move(last)
    return int(sizes[first : arena.resident].sum())


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
