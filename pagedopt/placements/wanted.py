"""What a store is asked to create: one column of a parameter's state."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..tables.shards import local
from ..tables.storage import Column


class Wanted(NamedTuple):
    """One column of a parameter's state that is to be created.

    Attributes:
        param: the parameter.
        key: name of the column in the parameter's state.
        column: dtype and shape.
        block: elements that are stored together, in this column or across columns.
        like: a tensor of the parameter's shape, whose strides the column takes; None: the parameter.
    """

    param: torch.Tensor
    key: str
    column: Column
    block: int = 1
    like: torch.Tensor | None = None

    @property
    def strided(self) -> torch.Tensor:
        """A tensor (it may be a meta tensor) with the shape and strides of the column."""
        return self.column.like(local(self.param if self.like is None else self.like))

    def zeros(self) -> torch.Tensor:
        """Return the column in memory of torch, on the parameter's device."""
        made, dtype = self.strided, self.column.dtype
        return torch.empty_strided(made.size(), made.stride(), dtype=dtype, device=self.param.device).zero_()
