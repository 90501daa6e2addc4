"""Which way to write AdamW's and Lion's update is nearest to float64, and what does it cost?

Answer (CPU, 2026-11): a parameter that is rounded once ends 18 times as near as in torch's ways, at no cost.  Lion's
momentum is 3.9 times nearer as a lerp than as the sum of two products, and a quarter as many updates turn.

All take the same steps from the same float32 numbers.  Exact is what torch's loop makes of them in float64 (of Lion:
the rule that ships), and errors are divided by the root mean square of the exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw as of_torch

from experiments.clock import Case
from experiments.columns import formatted
from experiments.comparing import on_one_clock
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.works.models import FOREACH, FUSED, LOOP
from pagedopt import multi_tensor_apply, rule
from pagedopt.rules import RULES, Rule, fma, sign, sqrt

# --- AdamW's and Lion's update, each written in several ways: one operation of a rule is replaced at a time

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


# --- the question

MEASURES = ("kernels",)
Tensors = list[torch.Tensor]


def walk(run: Run, family: str, names: Iterable[str], steps: int) -> tuple[dict[str, Tensors], Tensors, dict[str, int]]:
    """Tensors by form after so many steps; the exact ones; and how often an element moved the other way than there."""
    draw = torch.Generator(run.device).manual_seed(1)
    start = torch.randn(run.size(1 << 18, 1 << 10), generator=draw, device=run.device)
    grad, *means = (torch.zeros_like(start) for _ in RULES[family.lower()].inputs[1:])
    found = {name: [start.clone(), grad, *(mean.clone() for mean in means)] for name in names}
    exact = [t.double() for t in (start, grad, *means)]
    before, turned = dict.fromkeys(found, 0 * exact[0]), dict.fromkeys(found, torch.zeros_like(grad, dtype=torch.int64))
    for number in range(1, steps + 1):
        exact[1].copy_(grad.normal_(generator=draw))
        step(family, LOOP if family == "AdamW" else SHIPPED, exact, number)
        for name, tensors in found.items():
            off = step(family, name, tensors, number)[0] - exact[0]
            turned[name] = turned[name] + ((off - before[name]).abs() > HYPER[family]["lr"])
            before[name] = off
    return found, exact, {name: int(each.sum()) for name, each in turned.items()}


def difference(found: torch.Tensor, exact: torch.Tensor, once: torch.Tensor, usual: torch.Tensor) -> Row:
    """The error, and how many ulp one step ends from the usual one at most."""
    off, rms = (found - exact).abs(), exact.square().mean().sqrt()
    ulp = torch.nextafter(usual.abs(), torch.full_like(usual, torch.inf)) - usual.abs()
    ulps = int(((once - usual).abs() / ulp).max())
    return {"rms": float(off.square().mean().sqrt() / rms), "most": float(off.max() / rms), "ulps": ulps}


def measure(run: Run) -> Iterator[Row]:
    """A row per form: its errors, how far one step ends from torch's default (Lion: from two products), its times."""
    run.rounds, run.seconds = run.size((100, 10.0), (3, 0.1))
    gpu, steps = run.device.type == "cuda", run.size(1000, 20)
    timed = run.size(1 << (26 if gpu else 24), 1 << 10)
    for family in run.each(FORMS):
        inputs, forms = RULES[family.lower()].inputs, FORMS[family]
        default = PRODUCTS if family == "Lion" else FOREACH if gpu else LOOP
        forms = run.size(forms, {name: forms[name] for name in dict.fromkeys((default, SHIPPED))})
        large = [torch.rand(timed, device=run.device) for _ in inputs]
        timings = run.measure([Case(name, partial(step, family, name, large, 11)) for name in forms])
        begin = walk(run, family, [default], 10)[0][default]
        usual = step(family, default, [t.clone() for t in begin], 11)
        found, exact, turned = walk(run, family, forms, steps)
        about = {"family": family, "device": run.device.type, "steps": steps, "elements": len(exact[0]), "timed": timed}
        for name in forms:
            once = step(family, name, [t.clone() for t in begin], 11)
            errors = dict(zip(inputs, map(difference, found[name], exact, once, usual), strict=True))
            yield {**about, "case": name, "turned": turned[name], "errors": errors, **timings[name]}


def of(name: str, what: str, pattern: str = "{:.2e}") -> Callable[[Row], str]:
    """A column of the errors."""
    return formatted(lambda row: row["errors"].get(name, {}).get(what), pattern)


derive = on_one_clock


def report(page: Page, rows: Rows) -> None:
    """A table."""
    columns: dict[str, Column] = {"form": "case", "param, rms": of("param", "rms"),
        "exp_avg, rms": of("exp_avg", "rms"), "exp_avg_sq, rms": of("exp_avg_sq", "rms"),
        "turned": "turned", "µs, {clock}": "time"}  # fmt: skip
    title = "{family}, {device}: {steps:,} steps of {elements:,} elements; times of {timed:,}"
    page.table(title, rows, columns, by=("family",))
