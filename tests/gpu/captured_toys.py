"""Optimizers that a CUDA graph captures, over a few parameters on the current device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pagedopt import PagedAdamW
from tests.specs import ADAMW, SPECS, Case, Spec

HYPER = ADAMW.hyper
CAPTURABLE: dict[str, Any] = {**HYPER, **ADAMW.capturable}


def _maker(spec: Spec, case: Case) -> Callable[..., Any]:
    """A function that makes an optimizer of parameters."""

    def make(params: Any, **options: Any) -> Any:
        return case.make(False, [{"params": params}], **{**spec.capturable, **options})

    return make


KINDS: dict[str, Callable[..., Any]] = {
    **{case.name: _maker(spec, case) for spec in SPECS.values() for case in spec.cases},
    "bfloat16 state": functools.partial(PagedAdamW, **CAPTURABLE, state_format="bfloat16"),
    "int8": functools.partial(PagedAdamW, **CAPTURABLE, state_format="int8", rounding="stochastic", seed=5),
    "fused": functools.partial(PagedAdamW, **CAPTURABLE, fused=True),
    "clipped": functools.partial(PagedAdamW, **CAPTURABLE, max_grad_norm=0.5),
}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "in place": {"placement": "mapped", "device_budget": "50%", "host_access": "in_place"},
    "away, in place": {"placement": "mapped", "device_budget": 0, "host_access": "in_place"},
    "half, staged": {"placement": "mapped", "device_budget": "50%", "host_access": "staged"},
    "away, staged": {"placement": "mapped", "device_budget": 0, "host_access": "staged"},
    "memcpy": {"transport": "memcpy"},
    "struct": {"transport": "struct"},
}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((70_001,), (130, 7), (3,), ())
    return [torch.nn.Parameter(torch.randn(s, device="cuda", generator=generator)) for s in shapes]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1000 + step)
    return [torch.randn(p.shape, device="cuda", generator=generator) for p in parameters()]


def give(params: list[torch.nn.Parameter], step: int, in_place: bool = True) -> None:
    """Write a step's gradients into the memory they have; or give new ones."""
    for p, grad in zip(params, gradients(step), strict=True):
        if in_place and p.grad is not None:
            p.grad.copy_(grad)
        else:
            p.grad = grad


def begun(make: Callable[..., Any], **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters and their optimizer after two steps; the last one joined in the second."""
    params = parameters()
    optimizer = make(params, **options)
    for step in range(2):
        give(params, step)
        if step == 0:
            params[-1].grad = None
        optimizer.step()
    return params, optimizer


def captured(optimizer: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def all_state(optimizer: Any, params: list[torch.nn.Parameter]) -> list[Any]:
    return [p.detach() for p in params] + [t for p in params for t in optimizer.state[p].values()]


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    mine, theirs = all_state(one[1], one[0]), all_state(other[1], other[0])
    assert len(mine) == len(theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a.cpu(), b.cpu()), f"tensor {i} of {tuple(a.shape)} differs"
