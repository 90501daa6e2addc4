"""What does a step cost the host, by number of tensors and what is new in each step, beside torch's fused step?

Answer: see notes/fused_step.md.

Each optimizer steps in a loop of its own, in four blocks that take turns with the others'.  The GPU is waited for
before each step, so that the time of the call is the host's alone.  Ratios are of the medians over all blocks.  Where
there is no compiled look, or ``PAGEDOPT_LOOK=python`` forbids it, its column is left out.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from experiments.clock import series
from experiments.columns import formatted, spread
from experiments.comparing import over
from experiments.lab import Column, Page, Row, Rows, Run
from pagedopt import PagedAdamW
from pagedopt.system.look import VARIABLE, compiled_look, is_wanted

#: The name of the experiment's note.
NOTE = "fused_step"
MEASURES = ("launch", "tables", "optim")
SHAPE = (2, 3)
BLOCKS, WARM = 4, 5
#: Why there is no compiled look where the environment does not forbid it.
NO_LOOK = "a part of torch is not as expected, or could not be tested"
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
KEPT, ANEW = "kept", "made anew"
SAME, NEW = "same", "a new float"
#: Tensors: steps that are timed, and what torch fused ÷ ours is to be; over one tensor more if the lr stays the same.
COUNTS = {1: (400, 2.5), 100: (300, 8), 1000: (100, 8), 5000: (32, 10)}


class Work(NamedTuple):
    """What is stepped over.

    Attributes:
        gradients: kept, or made anew before each step.
        groups: how many parameter groups, if there are as many tensors.
        lr: the same in each step, or a new float, as a scheduler gives.
    """

    gradients: str
    groups: int = 1
    lr: str = SAME


WORKS = (Work(KEPT), Work(ANEW), Work(KEPT, 1, NEW), Work(ANEW, 1, NEW), Work(KEPT, 2, NEW), Work(ANEW, 2, NEW))


def measure(run: Run) -> Iterator[Row]:
    """A row per number of tensors and work: host times (µs) of ours with both looks and of torch's, and their ratio."""
    makes: dict[str, Make] = {"ours": PagedAdamW, "python": looking_in_python, "fused": fused}
    # Its self-test may be at work, and steps would look in Python until it has ended: so wait for it.
    if not is_wanted() or compiled_look(wait=True) is None:
        run.leave_out(f"PagedAdamW with a compiled look: {NO_LOOK if is_wanted() else f'{VARIABLE}=python'}")
        del makes["ours"]
    counts = run.size({count: steps for count, (steps, _) in COUNTS.items()}, {1: 8, 20: 8})
    for count, steps in run.each(list(counts.items())):
        for work in WORKS:
            if count < work.groups:
                continue
            stepped = {name: stepper(make, count, work, run.device) for name, make in makes.items()}
            times: dict[str, list[float]] = {name: [] for name in stepped}
            for _ in range(BLOCKS):
                for name, one in stepped.items():
                    times[name] += [one() for _ in range(WARM + steps // BLOCKS)][WARM:]
            found = {name: series(each, "host") for name, each in times.items()}
            about = {"tensors": count, **work._asdict(), "device": run.device.type, "clock": "host"}
            yield {**about, **found, "ratio": over(found["fused"], found.get("ours"))}


fused = functools.partial(torch.optim.AdamW, fused=True)


def looking_in_python(groups: list[dict[str, Any]]) -> PagedAdamW:
    """Return ours, whose steps look in Python."""
    with mock.patch.dict(os.environ, {VARIABLE: "python"}):
        return PagedAdamW(groups)


def stepper(make: Make, count: int, work: Work, device: torch.device) -> Callable[[], float]:
    """What takes a step and returns the microseconds of the call."""
    params = [torch.nn.Parameter(torch.randn(SHAPE, device=device)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = make([{"params": params[i :: work.groups], "weight_decay": 0.01 * i} for i in range(work.groups)])
    taken = 0

    def step() -> float:
        nonlocal taken
        taken += 1
        if work.gradients == ANEW:
            for p in params:
                p.grad = torch.zeros_like(p)
        if work.lr == NEW:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / taken
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        optimizer.step()
        return (time.perf_counter() - begin) * 1e6

    return step


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    columns: dict[str, Column] = {"tensors": "tensors", "gradients": "gradients",
        "PagedAdamW": spread("ours"), "looking in Python": "python", "torch fused": "fused",
        "torch ÷ ours": formatted("ratio", "{:.2f}")}  # fmt: skip
    title = "Host time of step() over tensors of 2 x 3 in one group, µs: median (p10 to p90)"
    page.table(title, rows.where(groups=1, lr=NEW), columns)
    for count, (_, least) in COUNTS.items():
        for groups in (1, 2):
            if groups <= count:
                for gradients, share in ((KEPT, 1.0), (ANEW, 0.85)):
                    page.bar(
                        f"torch fused ÷ ours, {count:,} tensors in {groups} groups, a new lr, gradients {gradients}",
                        rows.where(tensors=count, groups=groups, gradients=gradients, lr=NEW, device="cuda"),
                        "ratio",
                        f"≥ {round(least * share, 3)} x",
                    )
