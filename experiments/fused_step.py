"""How close is one step of PagedAdamW to a copy of its bytes, and how far from torch's own steps?

All contenders of a work step in interleaved rounds, each over its own copy of the same random parameters, after four of
its updates were held to float64.  The floor is a copy that reads and writes as many bytes as the update must: 28 per
float32 parameter (parameter, gradient and two moments read, all but the gradient written).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from experiments import fresh, fused_tables, report
from experiments.bench import Case, measure
from experiments.workloads import (
    Build,
    Reference,
    Work,
    compiled,
    freed,
    gpt2_shapes,
    graphed,
    ours,
    outside,
    theirs,
)
from pagedopt import PagedAdamW, PointerTable

OURS, FUSED, COPY = "PagedAdamW", "torch fused", "copy of its bytes"


class Run:
    """One run of the experiment: its options and what it has left out."""

    def __init__(self, quick: bool, compile_too: bool, console: Console) -> None:
        self.quick, self.compile_too, self.console = quick, compile_too, console
        self.left_out: list[str] = []
        self.rounds, self.seconds = (3, 0.1) if quick else (40, 3.0)


def works(quick: bool) -> dict[str, Work]:
    """What is stepped over, on which device each bar asks for it."""
    gpt2 = gpt2_shapes(500, 16, 32, 2) if quick else gpt2_shapes()
    billion = [(64, 64)] * 2 if quick else [(4096, 4096)] * 60
    fifty = [(1000,)] * 12 if quick else [(4_166_667,)] * 12
    some, many = (20, 100) if quick else (1000, 5000)
    # bf16: parameters and gradients are rounded to 8 bits, an update of 1e-3 is a few units of a parameter of 0.02.
    return {
        "gpt2": Work("AdamW fp32, GPT-2 124M (148 tensors)", gpt2, torch.float32, 28, 5e-5),
        "gpt2-bf16": Work("AdamW bf16 with fp32 state, GPT-2 124M", gpt2, torch.bfloat16, 22, 5e-2),
        "1b": Work("AdamW fp32, 1 B (60 x 4096²)", billion, torch.float32, 28, 5e-5),
        "1000": Work(f"{some:,} x (2, 3)", [(2, 3)] * some, torch.float32, 28, 5e-5),
        "5000": Work(f"{many:,} x (2, 3)", [(2, 3)] * many, torch.float32, 28, 5e-5),
        "50m": Work("50 M in 12 tensors", fifty, torch.float32, 28, 5e-5),
    }


def contenders(run: Run, key: str, cuda: bool) -> dict[str, Build]:
    """Who steps over a work."""
    found: dict[str, Build] = {OURS: ours(state_format="float32") if key == "gpt2-bf16" else ours()}
    if key == "gpt2" and cuda:
        found["PagedAdamW, managed state"] = ours(placement="managed")
    found[FUSED] = theirs(fused=True)
    found["torch foreach"] = theirs(foreach=True)
    if key in ("1b", "50m"):
        return found
    if key != "5000":
        found["torch loop"] = theirs(foreach=False)
    if cuda:
        found["CUDA graph of torch fused"] = graphed
    if key in ("gpt2", "1000"):
        if run.compile_too and key == "gpt2":
            found["torch.compile of foreach"] = compiled
        found.update(outside(run.left_out if key == "gpt2" else []) if cuda else {})
    return found


def step_times(run: Run, key: str, work: Work, device: torch.device) -> dict[str, Any] | None:
    """Check and time everyone over one work; None if it does not fit."""
    cuda = device.type == "cuda"
    builds = contenders(run, key, cuda)
    needed = work.numel * (8 + 16 * len(builds) + 32)
    if cuda and needed > (free := torch.cuda.mem_get_info(device)[0]):
        run.left_out.append(f"{work.name}: needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return None
    first = work.parameters(device)
    grads = [p.grad for p in first if p.grad is not None]
    reference = Reference(first)
    cases, errors = [], {}
    for name, build in builds.items():
        params = work.parameters(device, grads)
        try:
            contender = build(params)
            errors[name] = reference.error(params, contender)
        except (RuntimeError, ImportError) as error:
            if name == OURS:
                raise
            run.left_out.append(f"{work.name}, {name}: {error}")
            continue
        if not errors[name] <= work.tolerance:
            what = f"{work.name}, {name}: its update is off by {errors[name]:.2g} of itself, allowed {work.tolerance:g}"
            if name == OURS:
                raise AssertionError(what)
            run.left_out.append(f"{what}; timed all the same")
        cases.append(Case(name, contender.step))
    del first, reference
    if len(work.shapes) < 1000:
        cases.append(copy_case(work, device))
    timings = measure(cases, device, rounds=run.rounds, seconds=run.seconds)
    run.console.print(f"  {work.name} on {device.type}: {len(cases)} cases", highlight=False)
    return {
        "key": key, "work": work.name, "device": device.type, "numel": work.numel,
        "bytes": work.bytes_each * work.numel, "errors": errors,
        "times": {name: timing.as_dict() for name, timing in timings.items()},
    }  # fmt: skip


def copy_case(work: Work, device: torch.device) -> Case:
    """Read half the bytes of an update and write the other half."""
    source = torch.rand(work.bytes_each * work.numel // 8, device=device)
    target = torch.empty_like(source)
    return Case(COPY, lambda: target.copy_(source))


def refresh_times(run: Run, device: torch.device) -> dict[str, Any]:
    """Host time to find that 1,000 tensors (and as many gradients) lie where they did."""
    count = 20 if run.quick else 1000
    work = Work("refresh", [(2, 3)] * count, torch.float32, 28, 0)
    params = work.parameters(device)
    grads = [p.grad for p in params]
    one, two = PointerTable([params]), PointerTable([params, grads])
    cases = [
        Case("one list", lambda: one.refresh([params])),
        Case("parameters and gradients", lambda: two.refresh([params, grads])),
    ]
    # A host matter, timed as one: nothing is queued.
    timings = measure(cases, torch.device("cpu"), rounds=run.rounds, seconds=run.seconds)
    return {name: timing.host.__dict__ for name, timing in timings.items()}


def alone_times(run: Run, device: torch.device) -> dict[str, Any]:
    """Host time of ``step()`` over 148 small tensors when nothing else runs between steps, one optimizer at a time.

    The tables of the steps have it too, but there other contenders run in between and take the processor's caches:
    the two say how much a step costs in a loop of its own, and amid other work.
    """
    work = Work("alone", [(16,)] * (4 if run.quick else 148), torch.float32, 28, 0)
    found: dict[str, Any] = {}
    for name, make in ((OURS, PagedAdamW), (FUSED, functools.partial(torch.optim.AdamW, fused=True))):
        optimizer = make(work.parameters(device))
        for _ in range(10):
            optimizer.step()
        # A host matter, timed as one: the GPU is done with these tensors long before the host is.
        case = Case(name, optimizer.step)
        timings = measure([case], torch.device("cpu"), rounds=10 * run.rounds, seconds=run.seconds)
        found[name] = timings[name].host.__dict__
    return found


def experiment(run: Run, device: torch.device) -> dict[str, Any]:
    """Everything, as plain values."""
    run.console.print("steps", style="bold")
    known, steps = works(run.quick), []
    for key in ("gpt2", "gpt2-bf16", "1b", "1000", "5000") if device.type == "cuda" else ():
        with freed(device):
            steps.append(step_times(run, key, known[key], device))
    if device.type == "cpu":
        run.left_out.append("the GPU's bars: need a GPU")
    for key in ("5000", "50m"):
        steps.append(step_times(run, key, known[key], torch.device("cpu")))
    if not run.compile_too:
        run.left_out.append("torch.compile: takes 15 s and more; add --compile")
    run.console.print("refresh, fresh processes", style="bold")
    modules = [] if run.quick else [m for m in ("cupy", "numba") if importlib.util.find_spec(m)]
    return {
        "device": device.type, "quick": run.quick, "steps": [s for s in steps if s],
        "refresh": refresh_times(run, device),
        "alone": alone_times(run, device),
        "first step": fresh.first_steps(str(device), 1 if run.quick else 4),
        "imports": fresh.imports(modules),
        "left_out": run.left_out,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write JSON and a plot; or fill the note's tables from results."""
    parser = report.options("fused_step", __doc__)
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the foreach step on GPT-2, too")
    options = parser.parse_args(arguments)
    if report.refilled("fused_step", options, fused_tables.sections):
        return 0
    console = report.console()
    device = report.chosen_device(options.device)
    result = experiment(Run(options.quick, options.compile, console), device)
    for title, (headings, rows) in fused_tables.tables(result).items():
        report.show(console, title, headings, rows)
    plots = {"steps": fused_tables.plot_steps}
    return report.finish(console, options.out, "fused_step", device, result, fused_tables.bars(result), plots)
