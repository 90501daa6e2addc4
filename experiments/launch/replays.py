"""What does a CUDA graph leave of a call: kernels, launches, operators, allocations, bits?

Answer (H200, 2026-11): one launch, no operator, no allocation, the same bits: 5 times faster for 36 kernels, 34 times
for torch's fused step over 1,000 tensors.

Each is done eagerly and replayed, with the same bits.  A graph of optimizer steps is torch's fused one, for which every
number that changes is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from experiments.clock import Case
from experiments.comparing import over
from experiments.lab import Page, Row, Rows, Run
from experiments.works import builds
from experiments.works.graph import captured
from experiments.works.models import Build, Work
from experiments.works.slices import SPLIT, Slices
from experiments.works.trace import counted

NEEDS_GPU = True
MEASURES = ("launch", "tables", "optim")
EAGER, REPLAY = "eager", "replayed"
Call = Callable[[], Any]
#: Eager, replayed, and whether both have left the same bits.
Pair = tuple[Call, Call, Callable[[], bool]]


def measure(run: Run) -> Iterator[Row]:
    """A row per work and mode."""
    run.rounds, run.seconds = run.size((60, 1.0), (3, 0.1))
    fused, many, tiny = builds.theirs(fused=True, capturable=True), run.size(148, 4), run.size(1000, 10)
    works: dict[str, Callable[[], Pair]] = {
        SPLIT: partial(slices, run),
        f"torch fused AdamW, {many:,} x (64, 64)": partial(steps, fused, [(64, 64)] * many, run.device),
        f"torch fused AdamW, {tiny:,} x (2, 3)": partial(steps, fused, [(2, 3)] * tiny, run.device),
        f"PagedAdamW, {many:,} x (64, 64)": partial(steps, builds.ours(capturable=True), [(64, 64)] * many, run.device),
    }
    timed: list[tuple[Row, Call]] = []
    for name, make in run.each(works.items()):
        with run.attempt(name, (Exception,)):
            eager, replay, equal = make()
            same = equal()
            calls = {EAGER: eager, REPLAY: replay}
            for mode, timing in run.measure([Case(mode, call, repeats=2) for mode, call in calls.items()]).items():
                about = {
                    "work": name,
                    "mode": mode,
                    "different": int(not same),
                    "allocations": allocations(calls[mode]),
                }
                timed.append(({**about, **timing}, calls[mode]))
    for row, call in timed:  # last: launches behind a trace are slower
        with run.attempt("{work}, {mode}: its trace".format(**row), (Exception,)):
            yield {**row, **counted(call).as_dict()}


def allocations(call: Call) -> int:
    """Blocks that torch's allocator hands out in a call."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def slices(run: Run) -> Pair:
    """The puzzlers' work."""
    work = Slices(run.size(1024, 4), run.device)
    eager = work.way(work.split_stack)
    replay = captured(eager)
    return eager, replay, lambda: torch.equal(eager(), replay())


def steps(build: Build, shapes: list[tuple[int, ...]], device: torch.device) -> Pair:
    """An optimizer: as many steps of each, then the parameters compared."""
    work = Work("graph", shapes, torch.float32, 28, 0)
    first = work.parameters(device)
    second = work.parameters(device, [p.grad for p in first if p.grad is not None])
    step = build(first).step
    replay = captured(build(second).step)  # three steps to be warm; the capture takes none

    def equal() -> bool:
        for _ in range(3):
            step()
        for _ in range(4):
            step()
            replay()
        return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))

    return step, replay, equal


def derive(rows: Rows) -> Rows:
    """How many kernels more or less than eager, and how much faster."""
    found = Rows()
    for row in rows:
        eager = rows.first(work=row["work"], mode=EAGER)
        off = abs(row["kernels"] - eager["kernels"]) if eager else None
        found.append({**row, "off": off, "clock": "wall", "faster": over(eager and eager["wall"], row["wall"])})
    return found


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("eagerly, and replayed", rows, {"work": "work", "mode": "mode", "launches": "launches",
        "kernels": "kernels", "GPU µs": "gpu", "wall µs": "wall", "faster": "faster"})  # fmt: skip
    page.bar("replay: kernels more or less than eager", rows.where(mode=REPLAY), "off", "≤ 0")
    page.bar("replay: launches", rows.where(mode=REPLAY), "launches", "≤ 1")
    page.bar("replay: operators", rows.where(mode=REPLAY), "operators", "≤ 0")
    page.bar("replay: allocations", rows.where(mode=REPLAY), "allocations", "≤ 0")
    page.bar("replay: works whose bits differ", rows.where(mode=REPLAY), "different", "≤ 0")
