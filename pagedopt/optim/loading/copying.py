"""Move state into other tensors: where the placement wants it, into pages that can move, or into a deep copy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from ...placements import choose
from ...placements.store import Store, Wanted
from ...system.interrupts import Uninterrupted
from ..columns import state_columns, walked_like
from ..rule_optimizer import RuleOptimizer, occurrences, state_tensors
from .extras import relink
from .load import copy_values, in_order

Optimizer = TypeVar("Optimizer", bound=RuleOptimizer)
#: (what to ask the store for, the parameter's state in which it will replace a tensor)
Replaced = tuple[Wanted, dict[str, Any]]


def bring_home(optimizer: RuleOptimizer, store: Store) -> None:
    """Copy state that is not where the placement wants it into new tensors, and free each old one when it is copied."""
    outside = _elsewhere(optimizer, store)
    if not outside:
        return
    made = store.create([wanted for wanted, _ in outside])
    known = {id(entry[wanted.key]): new for (wanted, entry), new in zip(outside, made, strict=True)}
    with _idle(wanted.param.device for wanted, _ in outside):
        for (wanted, entry), tensor in zip(outside, made, strict=True):
            with Uninterrupted():
                copy_values(in_order([(tensor, entry[wanted.key])]), store)
                entry[wanted.key] = tensor
    relink(optimizer.state, known)
    store.forget(state_tensors(optimizer))


def into_pages(optimizer: RuleOptimizer, store: Store, nbytes: int | None = None) -> int:
    """Move state from torch's own tensors into pages that are away; return the bytes freed on the device.

    Only for an optimizer without placement and budget, else 0.  Takes the state of the last parameters, ``nbytes`` or
    little more (None: all).  Old tensors are replaced after all copies, so a failure or interrupt changes nothing.
    """
    if not store.is_unplaced():
        return 0
    with store.all_away():
        moving, freed = _last(_elsewhere(optimizer, store), nbytes)
        made = store.create([wanted for wanted, _ in moving]) if moving else []
    try:
        with _idle(wanted.param.device for wanted, _ in moving):
            for (wanted, entry), new in zip(moving, made, strict=True):
                copy_values(in_order([(new, entry[wanted.key])]), store)
        with Uninterrupted():
            known = {id(entry[wanted.key]): new for (wanted, entry), new in zip(moving, made, strict=True)}
            for (wanted, entry), new in zip(moving, made, strict=True):
                entry[wanted.key] = new
            relink(optimizer.state, known)
    finally:
        del made
        moving.clear()
        store.forget(state_tensors(optimizer))
    torch.cuda.empty_cache()  # pages and other processes can use the memory only if torch returns it to the driver
    return freed


def _elsewhere(optimizer: RuleOptimizer, store: Store) -> list[Replaced]:
    """Return the state that is not where the placement wants it."""
    states = _whole_state(optimizer, used=False)
    return [each for state in states if not all(store.is_home(e[w.key]) for w, e in state) for each in state]


def _last(state: list[Replaced], nbytes: int | None) -> tuple[list[Replaced], int]:
    """Return state of the last parameters on devices that can move it, at least ``nbytes`` of it, and its bytes."""
    found, total, last = [], 0, None
    for wanted, entry in reversed(state):
        if nbytes is not None and total >= nbytes and wanted.param is not last:
            break
        if choose.moves_on_demand(wanted.param.device):
            found.append((wanted, entry))
            total, last = total + entry[wanted.key].nbytes, wanted.param
    return found[::-1], total


@contextlib.contextmanager
def _idle(devices: Iterable[torch.device]) -> Iterator[None]:
    """Synchronize the GPUs before and after the block: other streams may still use the tensors that it replaces."""
    gpus = {device for device in devices if device.type == "cuda"}
    for device in gpus:
        torch.cuda.synchronize(device)
    yield
    for device in gpus:
        torch.cuda.synchronize(device)


def _whole_state(optimizer: RuleOptimizer, used: bool = True) -> list[list[Replaced]]:
    """Return the state columns of each parameter that has all of them, in the right shapes and on its device.

    New ones will have their dtypes, and their blocks where they lie now.  ``used=False`` adds state that
    ``preallocate=True`` has made and no step has used yet.
    """
    found = {}
    for _, group, p in occurrences(optimizer):
        if not (entry := optimizer.state.get(p) or (not used and optimizer.preallocated.get(p))):
            continue
        columns = state_columns(optimizer, optimizer.state_names(group), p, group)
        tensors = {key: (of, t) for key, of in columns.items() if of.fits(t := entry.get(key), p)}
        if columns and len(tensors) == len(columns):
            like = walked_like(columns, entry, p)
            found[p] = [(of.wanted(p, key, like, tensor.dtype), entry) for key, (of, tensor) in tensors.items()]
    return list(found.values())


def duplicate(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a deep copy.  State in arenas goes straight into the copy's arenas: ordinary memory might not hold it."""
    content = optimizer.__getstate__()
    twin = memo[id(optimizer)] = type(optimizer).__new__(type(optimizer))
    state = content.pop("state")
    empty = copy.copy(state)  # whatever mapping it is
    empty.clear()
    twin.__setstate__({**copy.deepcopy(content, memo), "state": empty})
    ours = [
        (wanted._replace(param=copy.deepcopy(wanted.param, memo)), entry[wanted.key])
        for state in _whole_state(optimizer)
        if not any(optimizer.store.is_outside_arenas(entry[wanted.key]) for wanted, entry in state)
        for wanted, entry in state
    ]
    made = twin.store.create([wanted for wanted, _ in ours]) if ours else []
    memo.update((id(tensor), new) for (_, tensor), new in zip(ours, made, strict=True))
    copy_values(in_order([(new, old) for (_, old), new in zip(ours, made, strict=True)]), twin.store)
    twin.state.update((copy.deepcopy(p, memo), copy.deepcopy(entry, memo)) for p, entry in state.items())
    return twin
