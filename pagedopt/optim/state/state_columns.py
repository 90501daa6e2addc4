"""The columns in which the state of a parameter is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from ...formats.floating import NUMBERS, columns_of
from ...formats.format import Column, Format
from ...formats.sixteen import PARAM
from ...placements.wanted import Wanted
from ...tables.columns import dense_like
from ...tables.misfit import misfit
from ...tables.shards import local
from .rule_optimizer import Group, RuleOptimizer


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


def state_columns(
    optimizer: RuleOptimizer, names: Iterable[str], p: torch.Tensor, group: Group
) -> dict[str, StateColumn]:
    """Return the columns of state ``names`` of a parameter in ``group``, by their keys in its entry, in that order.

    Last comes the column of what the parameter has lost, if its format has one.

    Raises:
        ValueError, TypeError: see :func:`pagedopt.formats.floating.format_of`.
    """
    found: dict[str, StateColumn] = {}
    for name in names:
        form = optimizer.format_of(name, p, group)
        found.update((key, StateColumn(name, form, column)) for key, column in columns_of(form, name, p.dtype).items())
    own = optimizer.form_of(p)
    if own is not None and (rest := own.remainder) is not None:
        found.update((column.key(PARAM), StateColumn(PARAM, rest, column)) for column in rest.columns)
    return found


def by_state(columns: Mapping[str, StateColumn]) -> dict[str, tuple[Format, list[str]]]:
    """Return, by the name of a state, its format and the keys of its columns."""
    found: dict[str, tuple[Format, list[str]]] = {}
    for key, of in columns.items():
        found.setdefault(of.name, (of.form, []))[1].append(key)
    return found


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


def walked_like(columns: Mapping[str, StateColumn], entry: Mapping[str, Any], p: torch.Tensor) -> torch.Tensor:
    """Return a tensor (it may be a meta tensor) with the strides along which kernels walk a parameter and its state.

    They are those of its first state in blocks (:func:`blocks_along`), else those of ``p``.
    """
    if all(of.form.block == 1 for of in columns.values()):
        return p
    states = [(form, keys) for form, keys in by_state(columns).values() if form.block > 1]
    found = (blocks_along(form, [entry.get(key) for key in keys], p) for form, keys in states)
    return next((like for like in found if like is not None), p)
