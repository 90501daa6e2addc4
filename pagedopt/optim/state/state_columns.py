"""What state a parameter has: the columns in which its state tensors are stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...formats.floating import NUMBERS, columns_of
from ...formats.format import Column, Format
from ...placements.store import Wanted
from .rule_optimizer import RuleOptimizer


class StateColumn(NamedTuple):
    """A column of a parameter's state.

    Attributes:
        name: of the state.
        form: how that is stored.
        column: which column of that this is.
    """

    name: str
    form: Format
    column: Column

    @property
    def free(self) -> bool:
        """Whether these are plain numbers, which may have another floating-point dtype than they were made in."""
        return self.form in NUMBERS

    def wanted(self, param: torch.Tensor, key: str, dtype: torch.dtype | None = None) -> Wanted:
        """What to ask a store for; ``dtype`` of entries if it is another one than usual."""
        column = Column(self.column.name, dtype or self.column.dtype, self.column.per)
        return Wanted(param, key, column, self.form.block)


def state_columns(optimizer: RuleOptimizer, names: Iterable[str], p: torch.Tensor) -> dict[str, StateColumn]:
    """The columns of state ``names`` of a parameter, by their keys in its entry, in the order of the names.

    Raises:
        ValueError, TypeError: see :func:`pagedopt.formats.floating.format_of`.
    """
    found: dict[str, StateColumn] = {}
    for name in names:
        form = optimizer.format_of(name, p)
        found.update((key, StateColumn(name, form, column)) for key, column in columns_of(form, name, p.dtype).items())
    return found
