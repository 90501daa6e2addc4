"""Convert between plain numbers and the columns of a format, a stretch of elements at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...formats.format import MOST, Format
from ...placements.store import Store
from ...tables.columns import widest_first
from ...tables.shards import like_shard, local
from .rule_optimizer import RuleOptimizer, occurrences
from .state_columns import state_columns

#: Elements converted at a time, a multiple of every format's block.
STRETCH = 4096 * MOST


@torch.no_grad()
def encode(
    form: Format,
    columns: Sequence[torch.Tensor],
    values: torch.Tensor | float,
    param: torch.Tensor,
    store: Store,
    begin: Callable[[], object] = bool,
) -> None:
    """Encode ``values``, in the shape of the parameter or one for all elements, into the columns of its state.

    Values whose strides differ from the parameter's are first copied, all at once.  ``begin`` is called before each
    write; before the first call, nothing has changed.
    """
    param, columns = local(param), [local(t) for t in columns]
    flat = [_flat(t, param) if c.per == 1 else t for t, c in zip(columns, form.columns, strict=True)]
    if isinstance(values, torch.Tensor):
        source = _flat(local(values).detach(), param)
    else:
        source = torch.full((), values).expand(param.numel())
    for first in range(0, param.numel(), STRETCH):
        encoded = form.encode(source[first : first + STRETCH].to(form.arithmetic).contiguous())
        begin()
        for target, column, entries in zip(flat, form.columns, encoded, strict=True):
            at = first // column.per
            target[at : at + len(entries)].copy_(entries)
        store.drop()  # writing brings pages that are away into memory, beyond the budget


def fill(form: Format, columns: Sequence[torch.Tensor], param: torch.Tensor, value: float, store: Store) -> None:
    """Encode one value into all elements."""
    encode(form, columns, value, param, store)


@torch.no_grad()
def decode(form: Format, columns: Sequence[torch.Tensor], param: torch.Tensor) -> torch.Tensor:
    """Return the values encoded in ``columns``, with the shape and strides of ``param``; a DTensor if it is one.

    They are on the host, and decoded a stretch at a time: a device needs no room for them.
    """
    whole, param, columns = param, local(param), [local(t) for t in columns]
    flat = [_flat(t, param) if c.per == 1 else t for t, c in zip(columns, form.columns, strict=True)]
    values = torch.empty_like(param, dtype=form.arithmetic, requires_grad=False, device="cpu")
    target, numel = _flat(values, param), param.numel()
    for first in range(0, numel, STRETCH):
        last = min(first + STRETCH, numel)
        parts = [t[first // c.per : c.entries(last)] for t, c in zip(flat, form.columns, strict=True)]
        target[first:last] = form.decode(*parts, numel=last - first)
    return like_shard(values, of=whole)


def decoded(optimizer: RuleOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict``, one of ``optimizer``, with all state as plain numbers."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for key, (_, group, p) in zip(keys, occurrences(optimizer), strict=True):
        entry = state.get(key)
        if not isinstance(entry, Mapping):
            continue
        rest = dict(entry)
        encoded: dict[tuple[str, Format], list[torch.Tensor]] = {}
        for column, of in state_columns(optimizer, optimizer.state_names(group), p, group).items():
            if not of.free and column in rest:
                encoded.setdefault((of.name, of.form), []).append(rest.pop(column))
        state[key] = rest | {name: decode(form, columns, p) for (name, form), columns in encoded.items()}
    return {**state_dict, "state": state}


def _flat(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the elements in the memory order of the parameter's: a view if ``tensor`` has the same order."""
    return tensor.permute(widest_first(param)).reshape(-1)
