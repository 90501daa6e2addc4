"""What does an iteration take with paged or offloaded optimizers of others, beside ours with its step hidden?

Answer: see notes/hiding.md.

bitsandbytes' PagedAdamW8bit keeps its state in managed memory, which nothing pushes out here: there is room on the
device, so this is its best case.  torchao's CPUOffloadOptimizer updates on the CPU, parameters and state, while the
backward goes on; clipping behind the backward comes too late for it.  Each runs in a process of its own: it may be
absent, and may end the process.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from experiments.child import Child
from experiments.lab import Page, Row, Rows, Run
from experiments.works.hidden import (
    COLUMNS,
    HIDDEN,
    MODELS,
    RESIDENT,
    TITLE,
    Plan,
    beside_resident,
    iterations,
    timed,
)  # fmt: skip
from experiments.works.training import Load, Training
from pagedopt.planning.sizes import SIZES

ANSWERS = {"offloaders": "hidden_step"}
NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
#: Ours, in the same run as others; and of these package, optimizer, format of its state, and models.
BESIDE: tuple[Plan, ...] = tuple(
    (model, Load(), state, way) for model in MODELS for state, way in (("float32", RESIDENT), ("int8", HIDDEN))
)
RIVALS = (
    ("bitsandbytes", "bitsandbytes PagedAdamW8bit, no pressure", "int8", ("355 M", "1.56 B")),
    ("torchao", "torchao CPUOffloadOptimizer", "float32", ("355 M",)),
)
#: Seconds until a rival's process is stopped.
LONGEST = 120
derive = beside_resident


def measure(run: Run) -> Iterator[Row]:
    """A row per model, format of state and way."""
    yield from iterations(run, BESIDE)
    for package, way, state, models in run.each(RIVALS):
        if importlib.util.find_spec(package) is None:
            run.leave_out(f"{package}: not installed")
            continue
        for model in models:
            child = Child(rival, package, MODELS[model], str(run.device), run.quick, limit=LONGEST)
            for row in child:
                yield {"model": model, "load": str(Load()), "state": state, "way": way, **row}
            if child.ended:
                run.leave_out(f"{way}, {model}: its process {child.ended}")


def rival(package: str, size: str, device: str, quick: bool) -> Iterator[Row]:
    """In a process of its own: times of iterations with another package's optimizer."""
    run = Run(torch.device(device), quick)
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    optimizers = importlib.import_module(f"{package}.optim")

    def offloaded(params: Any) -> Any:
        return optimizers.CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True)

    make = offloaded if package == "torchao" else optimizers.PagedAdamW8bit
    yield timed(run, Training(run.device, SIZES["tiny" if quick else size], Load(), make))


def report(page: Page, rows: Rows) -> None:
    """A table for a model."""
    page.table(TITLE, rows, COLUMNS, by=("model", "load"))
