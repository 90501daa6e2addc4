"""Rules that do nothing but store and load, elements in order of memory, and what is the same to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagedopt import rule


@rule
def put(value, level):  # type: ignore[no-untyped-def]
    """Store as state what the first list holds."""
    level = value
    return level


@rule
def get(value, level):  # type: ignore[no-untyped-def]
    """Load state into the first list."""
    value = level
    return value


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether arrays or tensors have the same dtypes and bits; a NaN is a NaN, whatever its bits."""
    return all(_same(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype:
        return False
    if not a.is_floating_point():
        return np.array_equal(a.numpy(), b.numpy())  # older versions of torch do little with unsigned integers
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(torch.where(a.isnan(), 0, a), torch.where(b.isnan(), 0, b))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
