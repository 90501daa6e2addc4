"""State in formats of several columns, and plain numbers: from one to the other, a stretch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...formats.format import MOST, Format
from ...placements.store import Store
from ...tables.columns import widest_first
from ...tables.shards import like_shard, local
from .rule_optimizer import RuleOptimizer, places
from .state_columns import state_columns

#: Elements that are converted at a time: whole blocks of any format.
STRETCH = 4096 * MOST


def encode(
    form: Format,
    columns: Sequence[torch.Tensor],
    values: torch.Tensor,
    param: torch.Tensor,
    memory: Store,
    begin: Callable[[], object] = bool,
) -> None:
    """Store ``values``, in the shape of the parameter, in the columns of its state.

    Values that are not laid out as the parameter are copied, all at once.

    Args:
        begin: called when nothing is left that may fail before something is written.
    """
    flat = _flat(local(values).detach(), local(param))
    _encode(form, columns, param, lambda first, last: flat[first:last], memory, begin)


def fill(form: Format, columns: Sequence[torch.Tensor], param: torch.Tensor, value: float, memory: Store) -> None:
    """Store one value in all elements."""
    _encode(form, columns, param, lambda first, last: torch.full((last - first,), value), memory)


@torch.no_grad()
def _encode(
    form: Format,
    columns: Sequence[torch.Tensor],
    param: torch.Tensor,
    values: Callable[[int, int], torch.Tensor],
    memory: Store,
    begin: Callable[[], object] = bool,
) -> None:
    param, columns = local(param), [local(t) for t in columns]
    flat = [_flat(t, param) if c.per == 1 else t for t, c in zip(columns, form.columns, strict=True)]
    numel = param.numel()
    for first in range(0, numel, STRETCH):
        last = min(first + STRETCH, numel)
        parts = form.encode(values(first, last).to(form.arithmetic))
        begin()
        for target, column, part in zip(flat, form.columns, parts, strict=True):
            at = first // column.per
            target[at : at + len(part)].copy_(part)
        memory.drop()  # keeps to the budget while pages are touched that should not stay in memory


@torch.no_grad()
def decode(form: Format, columns: Sequence[torch.Tensor], param: torch.Tensor) -> torch.Tensor:
    """The values that columns of a parameter's state stand for, in its shape and layout; a DTensor as it."""
    whole, param, columns = param, local(param), [local(t) for t in columns]
    flat = [_flat(t, param) if c.per == 1 else t for t, c in zip(columns, form.columns, strict=True)]
    values = torch.empty_like(param, dtype=form.arithmetic, requires_grad=False)
    target, numel = _flat(values, param), param.numel()
    for first in range(0, numel, STRETCH):
        last = min(first + STRETCH, numel)
        parts = [t[first // c.per : c.entries(last)] for t, c in zip(flat, form.columns, strict=True)]
        target[first:last] = form.decode(*parts, numel=last - first)
    return like_shard(values, of=whole)


def decoded(optimizer: RuleOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of ``optimizer`` with all state as plain numbers."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for key, (_, group, p) in zip(keys, places(optimizer), strict=True):
        entry = state.get(key)
        if not isinstance(entry, Mapping):
            continue
        columns = state_columns(optimizer, optimizer.state_names(group), p)
        stored: dict[str, list[str]] = {}
        for column, of in columns.items():
            if not of.free and column in entry:
                stored.setdefault(of.name, []).append(column)
        plain = {name: decode(columns[of[0]].form, [entry[c] for c in of], p) for name, of in stored.items()}
        gone = {c for of in stored.values() for c in of}
        state[key] = {**{name: value for name, value in entry.items() if name not in gone}, **plain}
    return {**state_dict, "state": state}


def _flat(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which the parameter's lie in memory: a view, if they do in ``tensor``, too."""
    return tensor.permute(widest_first(param)).reshape(-1)
