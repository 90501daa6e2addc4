"""The training that tests of parameters in 16 bits share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support import BF16

from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD
from pagedopt.formats.sixteen import SPLIT

SHAPES = ((70, 80), (13,), (5000,), (0,), ())
KINDS: dict[str, tuple[type[PagedOptimizer], dict[str, Any]]] = {
    "AdamW": (PagedAdamW, {"lr": 1e-4, "weight_decay": 0.1}),
    "Lion": (PagedLion, {"lr": 1e-5}),
    "SGD": (PagedSGD, {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5}),
    "plain SGD": (PagedSGD, {"lr": 1e-3}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "stochastic": {"param_rounding": "stochastic"},
    "+16": {"param_format": "bfloat16+16"},
    "+8": {"param_format": "bfloat16+8"},
    "+8 int8": {"param_format": "bfloat16+8", "state_format": "int8"},
}
Params = list[torch.nn.Parameter]


def parameters(dtype: torch.dtype = BF16) -> Params:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)) for shape in SHAPES]


def set_gradients(params: Params, step: int) -> None:
    """The same for parameters of any dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def train(opt: torch.optim.Optimizer, params: Params, steps: Sequence[int] | range) -> None:
    for step in steps:
        set_gradients(params, step)
        opt.step()


def master(opt: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    (form,) = [form for form in SPLIT.values() if form.columns[1].key("param") in opt.state[p]]
    lost = opt.state[p][form.columns[1].key("param")]
    return form.decode(p.detach().reshape(-1), lost.reshape(-1), numel=p.numel()).view(p.shape)


def trained(**options: Any) -> tuple[PagedAdamW, Params]:
    params = parameters()
    opt = PagedAdamW(params, **KINDS["AdamW"][1], **options)
    train(opt, params, range(3))
    return opt, params


def loaded(saved: dict[str, Any], params: Params, **options: Any) -> PagedAdamW:
    opt = PagedAdamW(params, **options)
    opt.load_state_dict(saved)
    return opt
