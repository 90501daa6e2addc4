"""The columns in which the state of a parameter is stored, and what is encoded in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from ..formats.floating import NUMBERS, columns_of
from ..formats.format import MAX_BLOCK, Column, Format
from ..formats.sixteen import LOST, PARAM
from ..placements.store import Store, Wanted
from ..tables.tensors import dense_like, like_shard, local, misfit, same_layout, widest_first
from .rule_optimizer import Group, RuleOptimizer, occurrences


class StateColumn(NamedTuple):
    """A column of a parameter's state: the name of that state, its format, and which of the format's columns it is."""

    name: str
    form: Format
    column: Column

    @property
    def free(self) -> bool:
        """Whether these are plain numbers, which users may replace by those of another floating-point dtype."""
        return self.form in NUMBERS

    def fits(self, tensor: object, p: torch.Tensor) -> TypeGuard[torch.Tensor]:
        """Whether it is a tensor with the shape of this column of ``p``'s state, on its device and sharded as it is."""
        return misfit(tensor, self.column.shape(p), device=p.device, placed=p, memory=False) is None

    def wanted(
        self, param: torch.Tensor, key: str, like: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Wanted:
        """Return this column for a store.  ``dtype`` overrides the column's; for ``like`` see :class:`Wanted`."""
        column = Column(self.column.name, dtype or self.column.dtype, self.column.per)
        return Wanted(param, key, column, self.form.block, like)


class Columns(dict[str, StateColumn]):
    """The columns of a parameter's state by their keys in its entry, in the rule's order.

    Last comes the column of what the parameter has lost, if its format has one.  Parameters that are alike share them.
    """

    @classmethod
    def of(cls, optimizer: RuleOptimizer, names: Iterable[str], p: torch.Tensor, group: Group) -> Columns:
        """Return the columns of state ``names`` of a parameter in ``group``.

        Raises:
            ValueError, TypeError: see :func:`pagedopt.formats.floating.format_of`.
        """
        found = cls()
        for name in names:
            form = optimizer.format_of(name, p, group)
            for key, column in columns_of(form, name, p.dtype).items():
                found[key] = StateColumn(name, form, column)
        own = optimizer.form_of(p)
        if own is not None and (rest := own.remainder) is not None:
            found.update((column.key(PARAM), StateColumn(PARAM, rest, column)) for column in rest.columns)
        return found

    @functools.cached_property
    def states(self) -> dict[str, tuple[Format, list[str]]]:
        """The format of each state, by its name, and the keys of its columns."""
        found: dict[str, tuple[Format, list[str]]] = {}
        for key, of in self.items():
            found.setdefault(of.name, (of.form, []))[1].append(key)
        return found

    @functools.cached_property
    def in_blocks(self) -> tuple[tuple[Format, list[str]], ...]:
        """Those of :attr:`states` that are stored in blocks."""
        return tuple([(form, keys) for form, keys in self.states.values() if form.block > 1])

    def walked_like(self, entry: Mapping[str, Any], p: torch.Tensor) -> torch.Tensor:
        """Return a tensor (it may be a meta tensor) with the strides along which kernels walk a parameter and state.

        They are those of its first state in blocks (:func:`blocks_along`), else those of ``p``.
        """
        found = (blocks_along(form, [entry.get(key) for key in keys], p) for form, keys in self.in_blocks)
        return next((like for like in found if like is not None), p)


def blocks_along(form: Format, columns: Sequence[torch.Tensor | None], p: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor (it may be a meta tensor) of the shape of ``p`` with the strides along which blocks lie.

    Blocks are stretches of memory, and the parameter may have been given other strides since they were encoded.  So the
    first column with an entry for each element says where they lie (None: it is missing).  A format without such a
    column has blocks of the flattened parameter.
    """
    if all(column.per > 1 for column in form.columns):
        return torch.empty(p.shape, device="meta")
    codes = next(tensor for tensor, column in zip(columns, form.columns, strict=True) if column.per == 1)
    return None if codes is None else dense_like(local(codes))


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
        rest = {name: each for name, each in entry.items() if name not in LOST}  # no state of another optimizer
        columns = Columns.of(optimizer, optimizer.state_names(group), p, group)
        numbers = {
            name: _laid_out(decode(form, [rest.pop(column) for column in keys], p), p)
            for name, (form, keys) in columns.states.items()
            if not columns[keys[0]].free and all(column in rest for column in keys)
        }
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
