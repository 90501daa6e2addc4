"""Clipped and scaled steps on a GPU: few kernels, and nothing waits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu_support import launching, no_synchronizing

from experiments.works.trace import counted
from pagedopt import PagedAdamW, ema

pytestmark = launching()

#: 2 MiB are a page of the default placement.
SIZES = (700_000, 3000, 17, 600_001, 1)
PLACES: dict[str, dict[str, Any]] = {
    "resident": {}, "staged": {"device_budget": 0}, "in place": {"device_budget": 0, "host_access": "in_place"},
}  # fmt: skip
NUMBERS = {"lr": 0.03, "weight_decay": 0.2}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).cuda()) for n in SIZES]


def give(params: Sequence[torch.nn.Parameter], step: int) -> None:
    """Gradients in memory of their own, or in that of those that are there."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(p)
        p.grad = grad if p.grad is None else p.grad.copy_(grad)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True, "after": ema(0.99)}], ids=["clipped", "and averaged"])
def test_no_step_waits_for_the_device(options: dict[str, Any], place: str) -> None:
    """Not even to leave out one without a finite norm; the average is torch's, to the bit."""
    params = parameters()
    optimizer = PagedAdamW(params, **NUMBERS, fused=True, max_grad_norm=1.0, **options, **PLACES[place])
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(8):
        give(params, step)
        if step == 5:
            params[1].grad[7] = float("nan")  # type: ignore[index]
        torch.cuda.synchronize()
        with no_synchronizing() if step > 2 else contextlib.nullcontext():  # the first make state, tables and graphs
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.grad_norm is not None
        if step == 0:
            averages = [p.detach().clone() for p in params]
        elif step != 5:
            torch._foreach_lerp_(averages, [p.detach() for p in params], 1 - 0.99)
    assert all(optimizer.state[p]["step"] == 7 for p in params)
    if "after" in options:
        assert all(torch.equal(optimizer.state[p]["param_ema"], each) for p, each in zip(params, averages, strict=True))


def test_kernels_of_a_step_are_counted() -> None:
    def kernels(scaled: bool = False, **options: Any) -> int:
        params = parameters()
        optimizer = PagedAdamW(params, fused=scaled or None, **options)
        give(params, 0)
        if scaled:
            optimizer.grad_scale = torch.ones((), device="cuda")
            optimizer.found_inf = torch.zeros((), device="cuda")
        for _ in range(3):
            optimizer.step()
        return counted(optimizer.step).kernels

    assert kernels() == 1
    assert kernels(max_grad_norm=1.0) == 3, "squares, their total, the step"
    assert kernels(scaled=True) == 2, "the prologue and the step: nothing for the scale"
    assert kernels(scaled=True, max_grad_norm=1.0) == 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("scaled", [False, True], ids=["clipped", "clipped and scaled"])
def test_parameters_on_two_gpus_have_one_norm(scaled: bool) -> None:
    mine, other = parameters(), parameters()
    for params in (mine, other):
        params[1::2] = [torch.nn.Parameter(p.detach().to("cuda:1")) for p in params[1::2]]
    a, b = PagedAdamW(mine, **NUMBERS, fused=scaled or None, max_grad_norm=5.0), torch.optim.AdamW(other, **NUMBERS)
    for step in range(5):
        give(mine, step)
        give(other, step)
        if scaled:
            for p in mine:
                p.grad.mul_(8)
            a.grad_scale, a.found_inf = torch.tensor(8.0, device="cuda"), torch.tensor(0.0, device="cuda")
        a.step()
        norm = torch.nn.utils.clip_grad_norm_(other, 5.0)
        b.step()
        torch.testing.assert_close(a.grad_norm, norm.double(), rtol=1e-6, atol=0)
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)
