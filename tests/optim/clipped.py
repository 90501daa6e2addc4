"""Parameters and gradients of tests that clip, and what a step leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from support import F32

SIZES = (3000, 17, 1, 40_000, 0)


def params_of(sizes: Sequence[int] = SIZES, dtype: torch.dtype = F32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]


def give(params: Iterable[torch.Tensor], seed: int, size: float = 1.0, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(dtype or p.dtype)


def ends(params: Iterable[torch.Tensor], optimizer: Any) -> list[torch.Tensor]:
    state = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*params, *state)]


def equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """To the bit, NaN too."""
    return all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(a, b, strict=True))
