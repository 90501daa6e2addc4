"""What does an iteration take with paged or offloaded optimizers of others?

bitsandbytes' PagedAdamW8bit keeps its state in managed memory, which nothing pushes out here: there is room on the
device, so this is its best case.  torchao's CPUOffloadOptimizer updates on the CPU, parameters and state, while the
backward goes on; clipping behind the backward comes too late for it.  Each runs in a process of its own: it may be
absent, and may end the process.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import cast

import torch

from experiments.child import Child
from experiments.lab import Page, Row, Rows, Run
from experiments.overlap.iteration import HIDDEN, MODELS, RESIDENT, derive, of_plan, shown, timed
from experiments.works.training import Load, Make, Training
from pagedopt.planning.sizes import SIZES

__all__ = ["derive", "measure", "report"]

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
BITSANDBYTES, TORCHAO = "bitsandbytes PagedAdamW8bit, no pressure", "torchao CPUOffloadOptimizer"
#: Ours, in the same run.
PLAN = (
    *(("355 M", Load(), state, way) for state, way in (("float32", RESIDENT), ("int8", HIDDEN))),
    *(("1.56 B", Load(), state, way) for state, way in (("float32", RESIDENT), ("int8", HIDDEN))),
)
#: Package, its optimizer, the format of its state, and models.
RIVALS = (
    ("bitsandbytes", BITSANDBYTES, "int8", ("355 M", "1.56 B")),
    ("torchao", TORCHAO, "float32", ("355 M",)),
)
#: Seconds until a rival's process is stopped.
LONGEST = 120


def measure(run: Run) -> Iterator[Row]:
    """A row per model and optimizer."""
    yield from of_plan(run, PLAN)
    for package, way, state, models in run.each(RIVALS):
        if importlib.util.find_spec(package) is None:
            run.leave_out(f"{package}: not installed")
            continue
        for model in models:
            child = Child(trained, way, model, str(run.device), run.quick, limit=LONGEST)
            for row in child:
                yield {"model": model, "load": str(Load()), "state": state, "way": way, **row}
            if child.ended:
                run.leave_out(f"{way}, {model}: its process {child.ended}")


# --- in a process of its own


def trained(way: str, model: str, device: str, quick: bool) -> Iterator[Row]:
    """Times of iterations."""
    run = Run(torch.device(device), quick)
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    size = SIZES["tiny" if quick else MODELS[model]]
    yield timed(run, Training(run.device, size, Load(), MAKERS[way]()))


def bitsandbytes() -> Make:
    """State in managed memory, in 8 bits."""
    return cast(Make, importlib.import_module("bitsandbytes.optim").PagedAdamW8bit)


def torchao() -> Make:
    """State, and the update itself, on the CPU."""
    offloaded = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return lambda params: offloaded(params, torch.optim.AdamW, fused=True)


MAKERS: dict[str, Callable[[], Make]] = {BITSANDBYTES: bitsandbytes, TORCHAO: torchao}


def report(page: Page, rows: Rows) -> None:
    """A table."""
    shown(page, rows, rows)
