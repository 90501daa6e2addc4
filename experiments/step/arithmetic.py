"""Which way to write AdamW's and Lion's update is nearest to float64, and what does it cost?

Answer (CPU, 2026-11): a parameter that is rounded once ends 18 times as near as in torch's ways, at no cost.  Lion's
momentum is 3.9 times nearer as a lerp than as the sum of two products, and a quarter as many updates turn.

All take the same steps from the same float32 numbers.  Exact is what torch's loop makes of them in float64 (of Lion:
the rule that ships), and errors are divided by the root mean square of the exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from experiments.lab import Case, Column, Page, Row, Rows, Run, formatted, on_one_clock, spread
from experiments.works.contenders import FOREACH, LOOP
from experiments.works.forms import FORMS, HYPER, PRODUCTS, SHIPPED, step
from pagedopt.rules import RULES

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
        large = [torch.rand(timed, device=run.device) for _ in inputs]
        timings = run.measure([Case(name, partial(step, family, name, large, 11)) for name in forms])
        default = PRODUCTS if family == "Lion" else FOREACH if gpu else LOOP
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
    more: dict[str, Column] = {"param, largest": of("param", "most"),
        "exp_avg, ulp": of("exp_avg", "ulps", "{:,.0f}"),
        "exp_avg_sq, ulp": of("exp_avg_sq", "ulps", "{:,.0f}"), "µs, {clock} (p10 to p90)": spread("time")}  # fmt: skip
    title = "{family}, {device}: {steps:,} steps of {elements:,} elements; times of {timed:,}"
    page.table(title, rows, columns, by=("family",))
    page.detail.table(title, rows, {**columns, **more}, by=("family",))
