"""What does it save to fuse a step with what stands around it: unscale, clip, average the weights, zero_grad?

Answer: over GPT-2 on an H200 ours takes 1.29 ms in 4 launches, 1.11 times a copy of its bytes.  torch's lists take 3.2
times that in 100 launches, and compiled 2.9 times in 332, which the host needs 11 ms to issue.

Everyone unscales gradients, clips them by their norm, steps, averages the weights, and zeroes the gradients: tensor by
tensor, with torch's lists, in one function that torch.compile has, and in ours.  Ours takes the scale as a scaler gives
it, clips and averages by its options, and lets gradients go: ``zero_grad(set_to_none=True)``.  Others write zeros, so
each step begins with gradients from a list, which costs everyone alike.  A clipped step reads gradients twice, and the
average is read and written: a copy of its bytes moves 40 a parameter.

The update of the first step, and the average behind the second, are held to those of the loop.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.clock import Case
from experiments.columns import percent, ratio
from experiments.comparing import by_clock_of, on_own_clock, over
from experiments.device import chosen_device
from experiments.lab import Page, Row, Rows, Run
from experiments.works.apart import counted_apart
from experiments.works.dispatch import dispatched
from experiments.works.models import COMPILED, COPY, FOREACH, HYPER, LOOP, OURS, Work, gpt2_shapes
from experiments.works.steps import copy_of_bytes, of_copy
from experiments.works.trace import counted
from pagedopt import PagedAdamW, ema

NOTE = "clip_and_scale"
MEASURES = ("kernels", "launch", "tables", "optim", "rules")
DECAY, SCALE, NORM, TOLERANCE = 0.999, 4.0, 1.0, 1e-3
Params = list[torch.nn.Parameter]
Averages = list[torch.Tensor]
#: Steps over parameters, and their averages.
Built = tuple[Callable[[], object], Callable[[], Averages]]


def options(parser: argparse.ArgumentParser) -> None:
    """What takes long."""
    parser.add_argument("--compile", action="store_true", help="with --quick, time torch.compile, too")


def around(params: Params, step: Callable[[], object], averages: Averages, foreach: bool) -> Callable[[], None]:
    """A step and all around it, in place."""

    def act() -> None:
        grads: list[Any] = [p.grad for p in params]
        if foreach:
            torch._foreach_mul_(grads, 1 / SCALE)
        else:
            for grad in grads:
                grad.mul_(1 / SCALE)
        torch.nn.utils.clip_grad_norm_(params, NORM, foreach=foreach)
        step()
        with torch.no_grad():
            if foreach:
                torch._foreach_lerp_(averages, [*params], 1 - DECAY)
                torch._foreach_zero_(grads)
            else:
                for average, p, grad in zip(averages, params, grads, strict=True):
                    average.lerp_(p, 1 - DECAY)
                    grad.zero_()

    return act


def of_torch(params: Params, foreach: bool = True, compiled: bool = False) -> Built:
    """torch's; averages begin as copies of the parameters behind the first step, as ours."""
    on_gpu = params[0].is_cuda
    lr = torch.tensor(HYPER["lr"], device=params[0].device) if compiled and on_gpu else HYPER["lr"]
    optimizer = torch.optim.AdamW(params, **{**HYPER, "lr": lr}, foreach=foreach, capturable=compiled and on_gpu)
    averages = [p.detach().clone() for p in params]
    act = around(params, optimizer.step, averages, foreach)
    begun = torch.compile(act, fullgraph=False) if compiled else act

    def step() -> None:
        first = not optimizer.state
        begun()
        if first:
            torch._foreach_copy_(averages, [p.detach() for p in params])

    return step, lambda: averages


def of_ours(params: Params) -> Built:
    """PagedAdamW."""
    optimizer: Any = PagedAdamW(params, **HYPER, fused=True, max_grad_norm=NORM, after=ema(DECAY))
    optimizer.grad_scale = torch.full((), SCALE, device=params[0].device)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: [optimizer.state[p]["param_ema"] for p in params]


WAYS: dict[str, Callable[[Params], Built]] = {
    LOOP: lambda params: of_torch(params, foreach=False),
    FOREACH: of_torch,
    COMPILED: lambda params: of_torch(params, compiled=True),
    OURS: of_ours,
}


def bound(params: Params, way: str) -> Built:
    """A way whose steps begin with the same gradients."""
    (step, averages), grads = WAYS[way](params), [p.grad for p in params]

    def act() -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        step()

    return act, averages


def work_of(quick: bool, device: torch.device) -> Work:
    """GPT-2, or a toy."""
    return Work("GPT-2", gpt2_shapes(500, 16, 32, 2) if quick or device.type == "cpu" else gpt2_shapes(), bytes_each=40)


def ways_of(quick: bool, compile_too: bool) -> list[str]:
    """Those that are asked for."""
    return [way for way in WAYS if way != COMPILED or compile_too or not quick]


def measure(run: Run) -> Iterator[Row]:
    """Times, launches and kernels (on a CPU: operators), and how far the updates are from the loop's."""
    work, ways = work_of(run.quick, run.device), ways_of(run.quick, run.options.compile)
    cases, errors, exact = [], dict[str, float](), list[torch.Tensor]()
    for way in run.each(ways):
        params = work.parameters(run.device)
        step, averages = bound(params, way)
        step()
        found = [p.detach().clone() for p in params]
        exact = exact or found
        step()
        errors[way] = distance(found, exact) + distance(averages(), exact)
        cases.append(Case(way, step))
    if (worst := max(errors.values())) > TOLERANCE * len(ways):
        raise AssertionError(f"two ways are {worst:.2g} apart: {errors}")
    done = counted_apart(run, launches, str(run.device), run.quick, run.options.compile, by=("case",))
    for case, timing in run.measure([*cases, copy_of_bytes(work, run.device)]).items():
        about = {"case": case, "device": run.device.type, "numel": work.numel, "error": errors.get(case)}
        yield {**about, **timing, **done.get((case,), {})}


def distance(values: Averages, exact: Averages) -> float:
    """The largest difference, of the largest number."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(values, exact, strict=True))


def launches(device: str, quick: bool, compile_too: bool) -> Iterator[Row]:
    """On a GPU in a process of its own: what each launches; on a CPU the operators that it calls."""
    where = chosen_device(device)
    for way in ways_of(quick, compile_too):
        step, _ = bound(work_of(quick, where).parameters(where), way)
        step()
        if where.type == "cpu":
            yield {"case": way, "launches": None, "kernels": dispatched(step).total()}
        else:
            found = counted(step)
            yield {"case": way, "launches": found.launches, "kernels": found.kernels}


def derive(rows: Rows) -> Rows:
    """Over a copy of the bytes, and over torch's lists."""
    rows = on_own_clock(rows)
    copy, lists = rows.first(case=COPY), rows.first(case=FOREACH)
    found = Rows()
    for row in rows:
        time, saves = row["time"], over(by_clock_of(row, lists), row["time"])
        share = of_copy(row, copy)
        found.append({**row, "of_copy": over(time, by_clock_of(row, copy)), "share": share, "saves": saves})
    return found


def report(page: Page, rows: Rows) -> None:
    """A table, and what is held to a limit."""
    page.table("unscale, clip, step, average and zero: {device}", rows, {"who": "case", "launches": "launches",
        "kernels (CPU: operators)": "kernels", "µs": "time", "of the copy": percent("share"),
        "foreach ÷ it": ratio("saves")})  # fmt: skip
    page.bar("with everything around it, of a copy of its bytes", rows.where(device="cuda", case=OURS), "of_copy",
        "≤ 1.09 x")  # fmt: skip
