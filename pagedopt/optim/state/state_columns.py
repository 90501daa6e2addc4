"""The columns in which the state of a parameter is stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeGuard

import torch

from ...formats.floating import NUMBERS, columns_of
from ...formats.format import Column, Format
from ...placements.store import Wanted
from ...tables.shards import placed_alike
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
        if not isinstance(tensor, torch.Tensor) or not placed_alike(tensor, p):
            return False
        return tensor.device == p.device and tensor.shape == self.column.shape(p)

    def wanted(self, param: torch.Tensor, key: str, dtype: torch.dtype | None = None) -> Wanted:
        """Return what to ask a store for.  ``dtype`` overrides the column's."""
        column = Column(self.column.name, dtype or self.column.dtype, self.column.per)
        return Wanted(param, key, column, self.form.block)


def state_columns(
    optimizer: RuleOptimizer, names: Iterable[str], p: torch.Tensor, group: Group
) -> dict[str, StateColumn]:
    """Return the columns of state ``names`` of a parameter in ``group``, by their keys in its entry, in that order.

    Raises:
        ValueError, TypeError: see :func:`pagedopt.formats.floating.format_of`.
    """
    found: dict[str, StateColumn] = {}
    for name in names:
        form = optimizer.format_of(name, p, group)
        found.update((key, StateColumn(name, form, column)) for key, column in columns_of(form, name, p.dtype).items())
    return found
