"""How fast is a step on a CPU beside torch's own, by size and number of threads?

Answer (2026-11): as fast as torch fused from 10⁷ elements on, where memory is what both wait for (0.93 to 1.04 on 1,
2 and 16 threads of the Xeon beside an H200, 0.97 to 0.99 on two cores of an EPYC), and 1.7 to 4.6 times as fast over
148 tensors.  Of 10⁵ elements Python is what counts: 0.71 to 0.84 there, 0.82 and 0.97 on the EPYC; of 10⁶ on 16
threads, too.

Each contender and torch fused take turns, step by step, over parameters of their own with the same gradients: a pair.
Both run on the threads that ``torch.set_num_threads`` gives.  A copy of as many bytes runs beside them; it is no floor
(:func:`experiments.works.steps.of_copy`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from experiments.clock import Case, sampled, series
from experiments.columns import gb_per_s
from experiments.lab import Page, Row, Rows, Run, number
from experiments.works.builds import ours, theirs
from experiments.works.models import FOREACH, FUSED, OURS, Shapes, Work, gpt2_shapes
from experiments.works.steps import checked, copy_of_bytes

#: The name of the experiment's note.
NOTE = "fused_step"
MEASURES = ("kernels", "launch", "tables", "optim")
CPU = torch.device("cpu")
AGAIN = "torch fused, once more"


def works(quick: bool) -> list[Work]:
    """What is stepped over."""
    sizes = (1_000, 50_000) if quick else (10**5, 10**6, 10**7, 5 * 10**7)
    shapes: dict[str, Shapes] = {f"{size:,} elements": [(size,)] for size in sizes}
    shapes["148 tensors"] = gpt2_shapes(100, 8, 8) if quick else gpt2_shapes(1000, 64, 64)
    return [Work(name, shape, torch.float32, 28, 5e-5) for name, shape in shapes.items()]


def measure(run: Run) -> Iterator[Row]:
    """A row per work, number of threads and contender: its times, those of torch fused between them, and the ratios."""
    run.rounds, run.seconds = run.size((1000, 2.0), (3, 0.05))
    before = torch.get_num_threads()
    try:
        for count in run.each(sorted({1, 2, len(os.sched_getaffinity(0))})):
            torch.set_num_threads(count)
            for work in run.each(works(run.quick)):
                fused_steps = dict.fromkeys((FUSED, AGAIN), theirs(fused=True))
                builds = {OURS: ours(), FOREACH: theirs(foreach=True), **fused_steps}
                cases, errors = checked(run, work, builds, CPU)
                *others, fused = sorted((*cases, copy_of_bytes(work, CPU)), key=lambda case: case.name == FUSED)
                about = {"work": work.name, "threads": count, "numel": work.numel, "bytes": 28 * work.numel}
                for case in others:
                    found = pairs(run, case, fused)
                    yield {**about, "case": case.name, "error": errors.get(case.name), **found}
                run.say(f"{work.name} on {count} thread{'s' * (count > 1)}")
    finally:
        torch.set_num_threads(before)


def pairs(run: Run, one: Case, other: Case) -> Row:
    """Two that take turns: the ``time`` of one, of the ``other``, and their ``ratio`` pair by pair."""
    found = sampled((one, other), CPU, run.rounds, run.seconds, run.warmup)
    mine, others = ([wall for _, wall, _ in samples] for samples in found)
    ratio = [b / a for a, b in zip(mine, others, strict=True)]
    return {"time": series(mine, "wall"), "other": series(others, "wall"), "ratio": series(ratio, "wall")}


def derive(rows: Rows) -> Rows:
    """GB/s, by the clock of the times."""
    return Rows({**row, "clock": row["time"]["clock"], "rate": gb_per_s("bytes", "time")(row)} for row in rows)


def beside(rows: Rows) -> str:
    """The speed of torch fused beside itself, from the least to the most: how exact the ratios are."""
    speeds = [row["ratio"]["median"] for row in rows.where(case=AGAIN)]
    return f"{AGAIN}: {number(min(speeds))} to {number(max(speeds))}." if speeds else ""


def report(page: Page, rows: Rows) -> None:
    """Tables, what follows, and what is held to a limit."""
    page.grid(f"{OURS}: speed over torch fused, by threads", rows.where(case=OURS), "work", "threads", "ratio", "over")
    page.say(beside(rows))
    page.bar("speed over torch fused, where it is least", rows.where(case=OURS), "ratio", "≥ 0.95 x")
