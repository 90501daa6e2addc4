"""Parameters large enough for several pages, and steps on them that need no model."""

from __future__ import annotations

from typing import Any

import torch
from optim_support import ADAMW
from torch.optim import Optimizer

from pagedopt import PagedAdamW

Params = list[torch.nn.Parameter]
#: Odd sizes, one larger than a page, one of a single element, one of none: 6.3 M elements, 48 MiB of AdamW state.
SHAPES = ((3, 700_001), (1,), (0, 5), (1024, 1024), (17,), (2_000_003,), (1200, 900), (33, 3))


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0, shapes: Any = SHAPES) -> Params:
    """Parameters on the GPU, the same for the same seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(*shape, device="cuda", generator=generator).to(dtype).requires_grad_(False))
        for shape in shapes
    ]


def steps(params: Params, opt: Optimizer, count: int, first: int = 0, gaps: bool = True) -> None:
    """Steps on gradients that depend on the step; every third step one parameter, every fifth the largest, has none."""
    for step in range(first, first + count):
        generator = torch.Generator("cuda").manual_seed(1000 + step)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype)
            absent = gaps and ((step % 3 == 2 and i == step % len(params)) or (step % 5 == 4 and i == 0))
            p.grad = None if absent else grad
        opt.step()


def trained(
    count: int, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, gaps: bool = True, **options: Any
) -> tuple[Params, PagedAdamW]:
    """Such parameters and their optimizer after ``count`` steps."""
    params = parameters(dtype, shapes=shapes)
    opt = PagedAdamW(params, **ADAMW, **options)
    steps(params, opt, count, gaps=gaps)
    return params, opt


def everything(params: Params, opt: Optimizer) -> list[torch.Tensor]:
    """Copies on the CPU of parameters and state."""
    tensors = list(params) + [v for p in params for v in opt.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [t.detach().cpu().clone() for t in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
