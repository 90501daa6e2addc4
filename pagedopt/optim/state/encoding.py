"""Convert between plain numbers and the columns of a format, a stretch of elements at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...formats.format import MAX_BLOCK, Format
from ...formats.sixteen import PARAM
from ...placements.store import Store
from ...tables.columns import dense_like, same_layout, widest_first
from ...tables.shards import like_shard, local
from .rule_optimizer import RuleOptimizer, occurrences
from .state_columns import blocks_along, by_state, state_columns

#: Elements converted at a time, a multiple of every format's block.
STRETCH = 4096 * MAX_BLOCK
HOST = torch.device("cpu")


@torch.no_grad()
def encode(
    form: Format,
    columns: Sequence[torch.Tensor],
    values: torch.Tensor | float,
    param: torch.Tensor,
    store: Store,
    begin: Callable[[], object] = bool,
) -> None:
    """Encode ``values``, in the shape of the parameter or one for all elements, into dense columns of its state.

    Values whose strides differ from the columns' are first copied, all at once.  ``begin`` is called before each
    write; before the first call, nothing has changed.
    """
    param = local(param)
    flat, like = _flat_columns(form, columns, param)
    if isinstance(values, torch.Tensor):
        source = _flat(local(values).detach(), like)
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
def decode(
    form: Format, columns: Sequence[torch.Tensor], param: torch.Tensor, device: torch.device = HOST
) -> torch.Tensor:
    """Return the values encoded in ``columns``, with the shape of ``param`` and their strides; a DTensor if it is one.

    They are decoded a stretch at a time: on the host, another device needs no room for them.
    """
    flat, like = _flat_columns(form, columns, local(param))
    values = torch.empty_strided(like.shape, like.stride(), dtype=form.arithmetic, device=device)
    target, numel = _flat(values, like), like.numel()
    for first in range(0, numel, STRETCH):
        last = min(first + STRETCH, numel)
        # One of the columns may have been copied to the host, out of the way of what is written.
        parts = [
            t[first // c.per : c.entries(last)].to(flat[0].device) for t, c in zip(flat, form.columns, strict=True)
        ]
        target[first:last] = form.decode(*parts, numel=last - first)
    return like_shard(values, of=param)


@torch.no_grad()
def decoded(optimizer: RuleOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict``, one of ``optimizer``, with all state as plain numbers, in the strides of parameters."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for key, (_, group, p) in zip(keys, occurrences(optimizer), strict=True):
        entry = state.get(key)
        if not isinstance(entry, Mapping):
            continue
        rest = dict(entry)
        columns = state_columns(optimizer, optimizer.state_names(group), p, group)
        numbers = {
            name: _laid_out(decode(form, [rest.pop(column) for column in keys], p), p)
            for name, (form, keys) in by_state(columns).items()
            if not columns[keys[0]].free and all(column in rest for column in keys)
        }
        numbers.pop(PARAM, None)  # what a parameter has lost is no state of another optimizer
        state[key] = rest | numbers
    return {**state_dict, "state": state}


def _laid_out(values: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return values with the strides of a parameter: themselves, or a copy."""
    made = dense_like(local(param))
    if same_layout(made.shape, local(values).stride(), made.stride()):
        return values
    copy = torch.empty_strided(made.shape, made.stride(), dtype=values.dtype, device="cpu")
    return like_shard(copy.copy_(local(values)), of=param)


def _flat_columns(
    form: Format, columns: Sequence[torch.Tensor], param: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return columns whose elements follow each other as in blocks, and a tensor with the strides of these.

    Dense columns that are laid out alike are views.
    """
    here = [local(tensor) for tensor in columns]
    like = blocks_along(form, here, param)
    assert like is not None, "no column is missing"
    return [_flat(t, like) if c.per == 1 else t for t, c in zip(here, form.columns, strict=True)], like


def _flat(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements in the memory order of those of ``like``: a view if ``tensor`` has the same order."""
    return tensor.permute(widest_first(like)).reshape(-1)
