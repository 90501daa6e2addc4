"""AdamW's and Lion's update, each written in several ways: one operation of a rule is replaced at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw as of_torch

from experiments.works.contenders import FOREACH, FUSED, LOOP
from pagedopt import multi_tensor_apply, rule
from pagedopt.rules import RULES, Rule, fma, sign, sqrt

#: Defaults of the classes; Lion decays as much as AdamW, 1e-5 in a step.
HYPER: dict[str, dict[str, float]] = {
    "AdamW": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    "Lion": {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
}


# fmt: off
# How a parameter decays and changes; a running mean; that of squares; the root of this, corrected for its beginning.
def rounded_once(param, change, decay): return param - fma(decay, param, change)
def decay_by_fma(param, change, decay): return fma(-decay, param, param) - change
def decay_multiplied(param, change, decay): return param * (1 - decay) - change
def lerp(x, mean, beta): return fma(1 - beta if beta > 0.5 else -beta, x - mean, mean if beta > 0.5 else x)
def products(x, mean, beta): return beta * mean + (1 - beta) * x
def one_fma(x, mean, beta): return fma(beta, mean, (1 - beta) * x)
def two_fma(x, mean, beta): return fma(beta, mean, fma(-beta, x, x))
def squares(x, mean, beta): return fma((1 - beta) * x, x, beta * mean)
def squares_less(x, mean, beta): return fma((1 - beta) * x, x, fma(-(1 - beta), mean, mean))
def squares_two_fma(x, mean, beta): return two_fma(x * x, mean, beta)
def multiplied(exp_avg_sq, correction): return sqrt(exp_avg_sq) * (1 / correction)
def divided(exp_avg_sq, correction): return sqrt(exp_avg_sq) / correction
# fmt: on


def form(family: str, onto=rounded_once, first=lerp, second=squares, root=multiplied) -> Rule:
    """AdamW or Lion of these operations, by default those of AdamW as it ships."""

    @rule
    def adamw(param, grad, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, step):
        exp_avg = first(grad, exp_avg, beta1)
        exp_avg_sq = second(grad, exp_avg_sq, beta2)
        change = (lr / (1 - beta1**step)) * exp_avg / (root(exp_avg_sq, (1 - beta2**step) ** 0.5) + eps)
        param = onto(param, change, lr * weight_decay)
        return param, exp_avg, exp_avg_sq

    @rule
    def lion(param, grad, exp_avg, *, lr, beta1, beta2, weight_decay):
        param = onto(param, lr * sign(products(grad, exp_avg, beta1)), lr * weight_decay)
        exp_avg = first(grad, exp_avg, beta2)
        return param, exp_avg

    return adamw if family == "AdamW" else lion


SHIPPED, BASE, PRODUCTS = "as it ships", "parameter rounded once, exp_avg as lerp", "exp_avg of two products"
#: By family and name: a rule, or torch's function.
FORMS: dict[str, dict[str, Any]] = {
    family: {
        SHIPPED: RULES[family.lower()], BASE: form(family), PRODUCTS: form(family, first=products),
        "exp_avg by one fma": form(family, first=one_fma), "exp_avg by two fma": form(family, first=two_fma),
        "decay by fma": form(family, decay_by_fma), "decay multiplied": form(family, decay_multiplied),
    }
    for family in HYPER
}  # fmt: skip
FORMS["AdamW"] |= {
    "exp_avg_sq less its share": form("AdamW", second=squares_less), "root divided": form("AdamW", root=divided),
    "exp_avg_sq by two fma": form("AdamW", second=squares_two_fma), LOOP: partial(of_torch, foreach=False),
    FOREACH: partial(of_torch, foreach=True), FUSED: partial(of_torch, fused=True),
}  # fmt: skip


def step(family: str, name: str, tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The tensors, after a step of one of the forms in place."""
    lists, hyper, way = [[t] for t in tensors], HYPER[family], FORMS[family][name]
    if isinstance(way, Rule):
        multi_tensor_apply(way, lists, hyper | ({"step": number} if "step" in way.scalars else {}))
    else:
        count = torch.tensor(number - 1.0, device=tensors[0].device if name == FUSED else "cpu")
        way(*lists, [], [count], amsgrad=False, maximize=False, **hyper)
    return tensors
