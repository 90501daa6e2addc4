"""State that changes its place: home after users put it elsewhere, and into the copy of an optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from ...placements import choose
from ...placements.store import Store, Wanted
from ...system.interrupts import Uninterrupted
from ...tables.shards import placed_alike
from ..state.rule_optimizer import RuleOptimizer, places
from ..state.state_columns import StateColumn, state_columns
from ..step.members import state_tensors
from .load import copy_values, in_order

Kind = TypeVar("Kind", bound=RuleOptimizer)


def bring_home(optimizer: RuleOptimizer, store: Store) -> None:
    """Move state that lies elsewhere to where the placement has it.

    Each old tensor goes when its new one is filled, and an arena with the last of its tensors.

    Raises:
        MemoryError, torch.OutOfMemoryError, CudaError: there is no room; what has not come yet stays where it is.
    """
    away = _elsewhere(optimizer, store)
    if not away:
        return
    made = store.create([wanted for wanted, _ in away])
    with _idle(tensor.device for _, tensor in away):
        for ((p, name, *_), _), tensor in zip(away, made, strict=True):
            with Uninterrupted():
                copy_values(in_order([(tensor, optimizer.state[p][name])]), store)
                optimizer.state[p][name] = tensor
    store.forget(state_tensors(optimizer))


def into_pages(optimizer: RuleOptimizer, store: Store, nbytes: int | None = None) -> int:
    """Send state away that nobody placed and that lies in torch's own tensors; returns the bytes given back.

    That of the last parameters, ``nbytes`` or little more (None: all), goes into new tensors in pages that move.  The
    old tensors go when all new ones are filled, so that what fails or is interrupted has changed nothing.

    Raises:
        MemoryError, CudaError: the host has no room.
    """
    if not store.is_unplaced():
        return 0
    with store.all_away():
        away, given = _last(_elsewhere(optimizer, store), nbytes)
        made = store.create([wanted for wanted, _ in away]) if away else []
    try:
        with _idle(tensor.device for _, tensor in away):
            for (_, old), new in zip(away, made, strict=True):
                copy_values(in_order([(new, old)]), store)
        with Uninterrupted():
            for ((p, name, *_), _), new in zip(away, made, strict=True):
                optimizer.state[p][name] = new
    finally:
        del made
        away.clear()
        store.forget(state_tensors(optimizer))
    torch.cuda.empty_cache()  # it is free for torch; pages and other processes need the driver to have it
    return given


def _elsewhere(optimizer: RuleOptimizer, store: Store) -> list[tuple[Wanted, torch.Tensor]]:
    """State that is not where the placement has it, with what is wanted there."""
    return [
        (of.wanted(p, key, tensor.dtype), tensor)
        for p, tensors in _whole_state(optimizer).items()
        if not all(store.is_home(tensor) for _, tensor in tensors.values())
        for key, (of, tensor) in tensors.items()
    ]


def _last(away: list[tuple[Wanted, torch.Tensor]], nbytes: int | None) -> tuple[list[tuple[Wanted, torch.Tensor]], int]:
    """Of state that moves on demand that of the last parameters, so many bytes or little more, and how many."""
    found, given, last = [], 0, None
    for wanted, tensor in reversed(away):
        if nbytes is not None and given >= nbytes and wanted.param is not last:
            break
        if choose.moves_on_demand(tensor.device):
            found.append((wanted, tensor))
            given, last = given + tensor.nbytes, wanted.param
    return found[::-1], given


@contextlib.contextmanager
def _idle(devices: Iterable[torch.device]) -> Iterator[None]:
    """A block before and behind which GPUs are waited for: other streams may still write what it copies, and what it
    lets go is memory of theirs."""
    gpus = {device for device in devices if device.type == "cuda"}
    for device in gpus:
        torch.cuda.synchronize(device)
    yield
    for device in gpus:
        torch.cuda.synchronize(device)


def _whole_state(optimizer: RuleOptimizer) -> dict[torch.Tensor, dict[str, tuple[StateColumn, torch.Tensor]]]:
    """The state of every parameter that has all its tensors, in their shapes and on its device, column by column."""
    found = {}
    for _, group, p in places(optimizer):
        if not (entry := optimizer.state.get(p)):
            continue
        columns = state_columns(optimizer, optimizer.state_names(group), p)
        tensors = {key: (of, t) for key, of in columns.items() if _fits(t := entry.get(key), p, of)}
        if columns and len(tensors) == len(columns):
            found[p] = tensors
    return found


def _fits(tensor: Any, p: torch.Tensor, of: StateColumn) -> bool:
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
    copy_values(in_order([(new, old) for (_, old), new in zip(ours, made, strict=True)]), twin.store)
    twin.state.update((copy.deepcopy(p, memo), copy.deepcopy(entry, memo)) for p, entry in state.items())
    return twin
