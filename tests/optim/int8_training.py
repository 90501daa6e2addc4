"""The training that tests of int8 state share, wherever state is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD

Params = list[torch.nn.Parameter]

#: State of the first spans pages of a file.  Two have too few elements for int8, one has none at all.
SHAPES = ((300, 301), (4096,), (4095,), (16, 257), (20, 256), (0,), (5000,), (7, 3))
KINDS: dict[str, tuple[type[PagedOptimizer], dict[str, Any]]] = {
    "stochastic": (PagedAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "nearest": (PagedAdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "amsgrad": (PagedAdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "lion": (PagedLion, {"lr": 1e-3, "weight_decay": 0.1}),
    "momentum": (PagedSGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}),
}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "file": {"placement": "file", "device_budget": 0},
    "part": {"placement": "file", "device_budget": "70%"},
}


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Params:
    """Every other matrix in another order of memory."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [torch.nn.Parameter(p.t().contiguous().t() if i % 2 else p) for i, p in enumerate(map(_matrix, made))]


def _matrix(p: torch.Tensor) -> torch.Tensor:
    return p if p.dim() == 2 else p.view(1, -1)


def gradient(p: torch.Tensor, step: int, number: int) -> torch.Tensor:
    """It depends on the parameter, so errors stay; some blocks are zero, tiny or large."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    grad = torch.randn(p.shape, generator=generator) + 0.1 * p.detach().float()
    flat = grad.view(-1)
    flat[512:900] = 0
    flat[1024:1280] *= 1e-18
    flat[1280:1500] *= 1e12
    return grad.to(p.dtype)


def not_finite(grad: torch.Tensor, step: int, number: int) -> None:
    """Some gradients of the fourth parameter are NaN, infinite, or so large that their square is."""
    if number == 3 and step >= 2:
        grad.view(-1)[: step + 1] = torch.tensor([torch.nan, torch.inf, 1e25, -torch.inf, 3e19, 1e18, -1e38, 0, 1])[
            : step + 1
        ]


def absent(step: int, number: int, late: bool) -> bool:
    """Whether there is no gradient: of two parameters up to some step, then of one now and then."""
    if not late:
        return False
    return (number == 1 and step < 2) or (number == 3 and step < 6) or (number == 4 and step % 3 == 1)


def give(params: Params, step: int, late: bool = True, wild: bool = False) -> None:
    """Put gradients of a step where they belong."""
    for number, p in enumerate(params):
        p.grad = None if absent(step, number, late) else gradient(p, step, number)
        if wild and p.grad is not None:
            not_finite(p.grad, step, number)


def bits(opt: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    """Copies of parameters and state."""
    return [t.detach().clone() for p in params for t in (p, *opt.state.get(p, {}).values())]


def train(opt: Any, params: Params, steps: range, late: bool = True) -> None:
    for step in steps:
        give(params, step, late)
        opt.step()
