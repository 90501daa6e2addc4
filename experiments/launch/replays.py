"""What does a CUDA graph leave of a call: kernels, launches, operators, allocations, bits?

Answer (H200, 2026-11): one launch, no operator, no allocation, the same bits: 5 times faster for 36 kernels, 34 times
for torch's fused step over 1,000 tensors.

Each is done eagerly and replayed, with the same bits.  A graph of optimizer steps is torch's fused one, for which every
number that changes is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table
from experiments.harness.time import Case
from experiments.works.models import HYPER, Work
from experiments.works.slices import SPLIT, Slices, captured
from experiments.works.trace import counted
from pagedopt import PagedAdamW

NEEDS_GPU = True
EAGER, REPLAY = "eager", "replayed"
Call = Callable[[], Any]
#: Eager, replayed, and whether both have left the same bits.
Pair = tuple[Call, Call, Callable[[], bool]]


def measure(run: Run) -> Iterator[Row]:
    """A row per work and mode."""
    run.rounds, run.seconds = run.size((60, 1.0), (3, 0.1))
    works = {
        SPLIT: lambda: slices(run),
        "torch fused AdamW, 148 x (64, 64)": lambda: fused([(64, 64)] * run.size(148, 4), run.device),
        "torch fused AdamW, 1,000 x (2, 3)": lambda: fused([(2, 3)] * run.size(1000, 10), run.device),
        "PagedAdamW, 148 x (64, 64)": lambda: paged([(64, 64)] * run.size(148, 4), run.device),
    }
    for name, make in run.each(works.items()):
        with run.attempt(name, (Exception,)):
            yield from of_work(run, name, make())


def of_work(run: Run, name: str, pair: Pair) -> Iterator[Row]:
    """Both modes, counted and timed."""
    eager, replay, equal = pair
    same = equal()
    calls = {EAGER: eager, REPLAY: replay}
    counts = {mode: {**counted(call).as_dict(), "allocations": allocations(call)} for mode, call in calls.items()}
    for mode, timing in run.measure([Case(mode, call, repeats=2) for mode, call in calls.items()]).items():
        yield {"work": name, "mode": mode, "different": int(not same), **counts[mode], **timing}


def allocations(call: Call) -> int:
    """Blocks that torch's allocator hands out in a call."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    result = call()
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    del result
    return int(after - before)


def slices(run: Run) -> Pair:
    """The puzzlers' work."""
    work = Slices(run.size(1024, 4), run.device)
    eager = work.way(work.split_stack)
    replay, _ = captured(eager)
    return eager, replay, lambda: torch.equal(eager(), replay())


def fused(shapes: list[tuple[int, ...]], device: torch.device) -> Pair:
    """torch's fused step: as many of each, then the parameters compared."""
    work = Work("graph", shapes, torch.float32, 28, 0)
    first = work.parameters(device)
    second = work.parameters(device, [p.grad for p in first if p.grad is not None])
    one, other = (torch.optim.AdamW(params, **HYPER, fused=True, capturable=True) for params in (first, second))
    replay, _ = captured(other.step)  # three steps to be warm; the capture takes none

    def equal() -> bool:
        for _ in range(3):
            one.step()
        for _ in range(4):
            one.step()
            replay()
        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    return one.step, replay, equal


def paged(shapes: list[tuple[int, ...]], device: torch.device) -> Pair:
    """Ours: its scalars are the host's, so it refuses to be captured, and says so."""
    params = Work("graph", shapes, torch.float32, 28, 0).parameters(device)
    optimizer = PagedAdamW(params, **HYPER)
    replay, _ = captured(optimizer.step)
    return optimizer.step, replay, lambda: True


def derive(rows: Rows) -> Rows:
    """How many kernels more or less than eager, and how much faster."""
    found = Rows()
    for group in rows.groups("work"):
        eager = group.first(mode=EAGER)
        for row in group:
            off = abs(row["kernels"] - eager["kernels"]) if eager else None
            faster = eager["wall"]["median"] / row["wall"]["median"] if eager else None
            found.append({**row, "off": off, "faster": faster})
    return found


TABLES = [
    Table("{work}", by=("work",), columns={
        "mode": "mode", "operators": "operators", "launches": "launches", "kernels": "kernels",
        "allocations": "allocations", "same bits": lambda row: "no" if row["different"] else "yes",
        "host µs": "host", "GPU µs": "gpu", "wall µs": "wall", "faster": "faster",
    })
]  # fmt: skip
BARS = [
    Bar("replay: kernels more or less than eager", "off", at_most=0, mode=REPLAY),
    Bar("replay: launches", "launches", at_most=1, mode=REPLAY),
    Bar("replay: operators", "operators", at_most=0, mode=REPLAY),
    Bar("replay: allocations", "allocations", at_most=0, mode=REPLAY),
    Bar("replay: works whose bits differ", "different", at_most=0, mode=REPLAY),
]
