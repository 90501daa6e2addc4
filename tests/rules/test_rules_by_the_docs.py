"""Three optimizers of papers, written from notes/extending.md alone, against the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, sqrt
from typing import Any, ClassVar

import pytest
import torch

from pagedopt import Moment, PagedOptimizer, rule

Tensor = torch.Tensor
SQUARES = Moment(signed=False, decay="beta2", squares=True)


@rule(moments={"exp_avg_sq": SQUARES})
def schedule_free(param, grad, z, exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, warmup, step, weight_sum):  # type: ignore[no-untyped-def]
    """Defazio et al. 2024, arXiv:2405.15682: ``param`` is where gradients are taken, y."""
    lr = lr * min(1, step / warmup)
    weight_sum = weight_sum + lr**2
    share = lr**2 / weight_sum
    z = param if step == 1 else z
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    change = grad / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps) + weight_decay * param
    param = param + share * (z - param) - lr * (1 - beta1 * (1 - share)) * change
    z = z - lr * change
    return param, z, exp_avg_sq, weight_sum


def schedule_free_in_torch(p: Tensor, grads: list[Tensor], lr: float = 0.1, beta1: float = 0.9) -> Tensor:
    z, v, weights = p.clone(), torch.zeros_like(p), 0.0
    for step, g in enumerate(grads, 1):
        rate = lr * min(1, step / 3)
        weights += rate**2
        v = 0.99 * v + 0.01 * g * g
        change = g / ((v / (1 - 0.99**step)).sqrt() + 1e-8) + 0.01 * p
        p = torch.lerp(p, z, rate**2 / weights) + rate * (beta1 * (1 - rate**2 / weights) - 1) * change
        z = z - rate * change
    return p


def mean(old, new, decay):  # type: ignore[no-untyped-def]
    return decay * old + (1 - decay) * new


@rule
def adan(
    param, grad, exp_avg, exp_avg_diff, exp_avg_sq, before, *, lr, decays1, decays2, decays3, eps, weight_decay, step
):  # type: ignore[no-untyped-def]
    """Xie et al. 2022, arXiv:2208.06677."""
    diff = grad - before if step > 1 else 0
    before = grad
    exp_avg, exp_avg_diff = mean(exp_avg, grad, decays1), mean(exp_avg_diff, diff, decays2)
    exp_avg_sq = mean(exp_avg_sq, (grad + decays2 * diff) ** 2, decays3)
    first, second, third = (1 - decay**step for decay in (decays1, decays2, decays3))
    change = (exp_avg / first + decays2 * exp_avg_diff / second) / (sqrt(exp_avg_sq / third) + eps)
    param = (param - lr * change) / (1 + lr * weight_decay)
    return param, exp_avg, exp_avg_diff, exp_avg_sq, before


def adan_in_torch(p: Tensor, grads: list[Tensor]) -> Tensor:
    m, v, n, last = (torch.zeros_like(p) for _ in range(4))
    for step, g in enumerate(grads, 1):
        diff = g - last if step > 1 else torch.zeros_like(p)
        m, v, n = m.lerp(g, 0.02), v.lerp(diff, 0.08), n.lerp((g + 0.92 * diff).square(), 0.01)
        change = m / (1 - 0.98**step) + 0.92 * v / (1 - 0.92**step)
        p = (p - 0.1 * change / ((n / (1 - 0.99**step)).sqrt() + 1e-8)) / (1 + 0.1 * 0.01)
        last = g
    return p


def half_life_between(begin, end, share):  # type: ignore[no-untyped-def]
    return min(exp(log(begin) * log(end) / ((1 - share) * log(end) + share * log(begin))), end)


@rule(moments={"fast": Moment(decay="beta1"), "exp_avg_sq": SQUARES})
def ademamix(
    param, grad, fast, slow, exp_avg_sq, *, lr, beta1, beta2, slow_decay, alpha, until, eps, weight_decay, step
):  # type: ignore[no-untyped-def]
    """Pagliardini et al. 2024, arXiv:2409.03137."""
    share = step / until
    fast = mean(fast, grad, beta1)
    slow = mean(slow, grad, half_life_between(beta1, slow_decay, share))
    exp_avg_sq = mean(exp_avg_sq, grad * grad, beta2)
    change = fast / (1 - beta1**step) + min(alpha * share, alpha) * slow
    param = param - lr * (change / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps) + weight_decay * param)
    return param, fast, slow, exp_avg_sq


def ademamix_in_torch(p: Tensor, grads: list[Tensor]) -> Tensor:
    fast, slow, v = (torch.zeros_like(p) for _ in range(3))
    for step, g in enumerate(grads, 1):
        a, b, share = log(0.9), log(0.999), step / 4
        decay = min(exp(a * b / ((1 - share) * b + share * a)), 0.999)
        fast, slow, v = fast.lerp(g, 0.1), slow.lerp(g, 1 - decay), v.lerp(g * g, 0.01)
        change = fast / (1 - 0.9**step) + min(5 * share, 5) * slow
        p = p - 0.1 * (change / ((v / (1 - 0.99**step)).sqrt() + 1e-8) + 0.01 * p)
    return p


BETAS: dict[str, Any] = {"betas": (0.9, 0.99)}
CASES: dict[str, tuple[Any, dict[str, Any], Callable[..., Tensor]]] = {
    "Schedule-Free": (schedule_free, {**BETAS, "warmup": 3}, schedule_free_in_torch),
    "Adan": (adan, {"decays1": 0.98, "decays2": 0.92, "decays3": 0.99}, adan_in_torch),
    "AdEMAMix": (ademamix, {**BETAS, "slow_decay": 0.999, "alpha": 5.0, "until": 4}, ademamix_in_torch),
}


@pytest.mark.parametrize("budget", [None, 0], ids=["device", "file"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_papers(name: str, budget: int | None) -> None:
    chosen, own, in_torch = CASES[name]

    class Own(PagedOptimizer):
        rule: ClassVar = chosen

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01, **own}, **options)

    p = torch.nn.Parameter(torch.linspace(-1, 1, 70, dtype=torch.float64))
    grads = [torch.sin(p.detach() * (i + 2) + i) for i in range(6)]
    want = in_torch(p.detach().clone(), grads)
    optimizer = Own([p], device_budget=budget)
    for p.grad in grads:
        optimizer.step()
    torch.testing.assert_close(p.detach(), want, rtol=1e-6, atol=1e-9)  # numbers in the state are float32
