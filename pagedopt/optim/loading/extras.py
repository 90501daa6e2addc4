"""Extras: what stands in ``optimizer.state`` and no rule names, because a wrapper or a user has put it there.

A load treats them as torch does.  What stands under a key that is no parameter stays the same object.  In the entry of
a parameter, tensors go to its device and dtype, and containers are made anew; all else stays the same object.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...tables.tensors import has_memory
from ..scalars import beside_param
from .check import Loaded, State

IsWritten = Callable[[torch.Tensor], bool]


@torch.no_grad()
def with_extras(entries: State, state: Mapping[Any, Any], members: Sequence[Loaded], is_written: IsWritten) -> State:
    """Return ``entries``, state of an optimizer's own, with the extras of ``state``, a loaded one, and in its order.

    Args:
        entries: by parameter, the tensors that the load will fill.
        state: what is loaded, by key.
        members: all parameters of the optimizer.
        is_written: whether the load writes into the memory of a tensor.
    """
    by_key = {member.key: member for member in members}
    extras = _Extras({id(member.param): member.param for member in members}, is_written)
    for member in members:
        extras.follow(member.entry, entries.get(member.param, {}))
    found: dict[Any, Any] = {}
    for key, value in state.items():
        if key not in by_key:
            found[key] = extras.beside_entries(value)
            continue
        member = by_key[key]
        if (own := entries.get(member.param)) is not None:
            read = {*own, *(column for source in member.sources.values() for column in source.columns)}
            others = {name: extras.in_entry(item, name, member) for name, item in value.items() if name not in read}
            found[member.param] = {**own, **others}
    return found


def relink(state: MutableMapping[Any, Any], known: dict[int, torch.Tensor]) -> None:
    """Replace tensors in the extras of an optimizer's state by those that ``known`` has for their ids."""
    extras = _Extras(known, lambda _: False)
    for key, value in state.items():
        if (linked := extras.beside_entries(value)) is not value:
            state[key] = linked


@dataclass(frozen=True)
class _Extras:
    """How extras are taken over.

    Attributes:
        known: tensors by their ids: of a parameter itself, of loaded state the tensor that will have its values.
        is_written: whether the load writes into the memory of a tensor.
    """

    known: dict[int, torch.Tensor]
    is_written: IsWritten

    def follow(self, loaded: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
        """Let extras that are ``loaded`` state be the optimizer's ``own``, where torch would take the loaded tensor."""
        for name, tensor in own.items():
            value = loaded.get(name)
            if isinstance(value, torch.Tensor) and (value.dtype, value.device) == (tensor.dtype, tensor.device):
                self.known[id(value)] = tensor

    def beside_entries(self, value: Any) -> Any:
        """Return what is loaded under a key that is no parameter: ``value``, if no tensor in it has to be another."""
        changed = False

        def link(tensor: torch.Tensor, _: Any) -> torch.Tensor:
            nonlocal changed
            linked = self.known[id(tensor)] if id(tensor) in self.known else self._apart(tensor)
            changed |= linked is not tensor
            return linked

        linked = _rebuilt(value, None, link, {})
        return linked if changed else value

    def in_entry(self, value: Any, key: Any, member: Loaded) -> Any:
        """Return what is loaded under ``key`` in the entry of a parameter."""
        p = member.param

        def place(tensor: torch.Tensor, key: Any) -> torch.Tensor:
            if id(tensor) in self.known:
                return self.known[id(tensor)]
            if key != "step":
                placed = tensor.to(p.device, p.dtype if p.is_floating_point() else tensor.dtype)
            else:
                placed = tensor.to(p.device, torch.float32) if beside_param(member.group) else tensor
            return self._apart(placed)

        return _rebuilt(value, key, place, {})

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, or a copy if it lies where the load writes.  (Other subclasses may have no memory.)"""
        known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        return tensor.clone() if known and has_memory(tensor) and self.is_written(tensor) else tensor


def _rebuilt(value: Any, key: Any, change: Callable[[torch.Tensor, Any], torch.Tensor], made: dict[int, Any]) -> Any:
    """Return ``value`` with each tensor within changed; ``made`` has the new containers by the ids of the old."""
    if isinstance(value, torch.Tensor):
        return change(value, key)
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, dict | list | deque):
        made[id(value)] = new = copy.copy(value)
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            new[name] = _rebuilt(item, name if isinstance(value, dict) else None, change, made)
        return new
    if type(value) in (tuple, set, frozenset):
        return type(value)(_rebuilt(item, None, change, made) for item in value)
    return value
