"""What does a step cost the host, by number of tensors, with gradients kept and made anew, beside torch's fused step?

Answer: see notes/fused_step.md.

Each optimizer steps in a loop of its own, in four blocks that take turns with the other's.  The GPU is waited for
before each step, so that the time of the call is the host's alone.  Ratios are of the medians over all blocks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.lab import Bar, Row, Run, Table, formatted, over, series, spread
from pagedopt import PagedAdamW

#: The name of the experiment's note.
NOTE = "fused_step"
MEASURES = ("launch", "step")
SHAPE = (2, 3)
BLOCKS, WARM = 4, 5
KEPT, ANEW = "kept", "made anew"
#: Tensors: steps that are timed, and what torch fused ÷ ours is to be.
COUNTS = {1: (400, 0.75), 100: (300, 2.1), 1000: (100, 3.4), 5000: (32, 4.0)}


def measure(run: Run) -> Iterator[Row]:
    """A row per number of tensors and way of gradients: host times (µs) of both, and their ratio."""
    counts = run.size({count: steps for count, (steps, _) in COUNTS.items()}, {1: 8, 20: 8})
    for count, steps in run.each(list(counts.items())):
        for gradients in (KEPT, ANEW):
            kinds = (PagedAdamW, functools.partial(torch.optim.AdamW, fused=True))
            stepped = [stepper(make, count, gradients, run.device) for make in kinds]
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(BLOCKS):
                for one, found in zip(stepped, times, strict=True):
                    found += [one() for _ in range(WARM + steps // BLOCKS)][WARM:]
            ours, fused = (series(found, "host") for found in times)
            about = {"tensors": count, "gradients": gradients, "device": run.device.type, "clock": "host"}
            yield {**about, "ours": ours, "fused": fused, "ratio": over(fused, ours)}


def stepper(
    make: Callable[[list[torch.nn.Parameter]], Any], count: int, gradients: str, device: torch.device
) -> Callable[[], float]:
    """What takes a step and returns the microseconds of the call."""
    params = [torch.nn.Parameter(torch.randn(SHAPE, device=device)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = make(params)

    def step() -> float:
        if gradients == ANEW:
            for p in params:
                p.grad = torch.zeros_like(p)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        optimizer.step()
        return (time.perf_counter() - begin) * 1e6

    return step


TABLES = [
    Table("Host time of step() over tensors of 2 x 3, µs: median (p10 to p90)", {
        "tensors": "tensors", "gradients": "gradients", "PagedAdamW": spread("ours"), "torch fused": spread("fused"),
        "torch ÷ ours": formatted("ratio", "{:.2f}"),
    })
]  # fmt: skip
BARS = [
    Bar(f"torch fused ÷ ours, {count:,} tensors, gradients {gradients}", "ratio", at_least=round(least * share, 3),
        unit="x", tensors=count, gradients=gradients, device="cuda")
    for count, (_, least) in COUNTS.items()
    for gradients, share in ((KEPT, 1.0), (ANEW, 0.9))
]  # fmt: skip
