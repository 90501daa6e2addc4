"""How long does a copy of a data loader wait beside a step?

A copy engine serves in order and knows no priorities: a copy of 4 MiB to the device stands behind the pages that were
asked for before it.  Copies come from page-locked memory.  A prefetcher's stream, which does nothing but copy, is given
one with each layer of each forward: the host is ahead of the GPU then, which is still busy with the step.  The model's
stream is given one before each forward, as by ``batch.to(device, non_blocking=True)``.  What is timed begins when what
stands before the copy on its stream is done, and ends when its bytes have arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from experiments.lab import Page, Row, Rows, Run, formatted, ms, series, spread_ms
from experiments.overlap.iteration import EXPOSED, HIDDEN, MODELS, RESIDENT, maker
from experiments.works.training import Load, Mark, Training
from pagedopt.planning.sizes import SIZES

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
PIECE = 4 << 20
ALONE = "nothing"
NAMES = ("time", "p99")
OWN, MODELS_STREAM = "its own stream", "the model's stream"
PLAN = (("float32", RESIDENT), ("int8", EXPOSED), ("int8", HIDDEN), ("float32", HIDDEN))


class Loader:
    """Copies to the device, on a stream of its own or on the current one.

    Attributes:
        marks: begin and end of each copy.
    """

    def __init__(self, device: torch.device, stream: str) -> None:
        on_gpu = device.type == "cuda"
        self.marks: list[tuple[Mark, Mark]] = []
        self._device = device
        self._here = torch.ones(PIECE, dtype=torch.uint8, pin_memory=on_gpu)
        self._there = torch.empty_like(self._here, device=device)
        self._stream = torch.cuda.Stream(device) if on_gpu and stream == OWN else None

    def copy(self, *_: Any) -> None:
        """Ask for a copy; a hook of a module."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            begin = Mark(self._device)
            self._there.copy_(self._here, non_blocking=True)
            self.marks.append((begin, Mark(self._device)))

    def times(self) -> Row:
        """All copies as a series (µs), and what one of a hundred exceeds."""
        took = [end.since(begin) for begin, end in self.marks]
        clock = "GPU" if self._device.type == "cuda" else "wall"
        return {"time": series(took, clock), "p99": series([np.percentile(took, 99)], clock)}


def measure(run: Run) -> Iterator[Row]:
    """A row per format of state and way; first one with nothing beside the copies."""
    alone = Loader(run.device, OWN)
    for _ in range(run.size(500, 5)):
        alone.copy()
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    yield {"state": "", "way": ALONE, "stream": OWN, **alone.times()}
    for state, way in run.each(PLAN):
        with run.attempt(f"{state}, {way}"):
            training = Training(run.device, SIZES[run.size(MODELS["1.56 B"], "tiny")], Load(), maker(way, state))
            if way == HIDDEN:
                training.optimizer.attach(training.model)
            for _ in range(3):
                training.iterate()
            for stream, count in ((OWN, 12), (MODELS_STREAM, 40)):
                yield {"state": state, "way": way, "stream": stream, **copies(run, training, stream, count)}
            del training


def copies(run: Run, training: Training, stream: str, count: int) -> Row:
    """Times of copies in so many iterations: on a stream of their own one before each layer, else one of a batch."""
    training.wait()
    loader = Loader(run.device, stream)
    layers = training.model.layers if stream == OWN else ()
    handles = [layer.register_forward_pre_hook(loader.copy) for layer in layers]
    for _ in range(run.size(count, 2)):
        if stream == MODELS_STREAM:
            loader.copy()
        training.iterate()
    training.wait()
    for handle in handles:
        handle.remove()
    return loader.times()


def derive(rows: Rows) -> Rows:
    """How much longer than beside a step with all state on the device: what a copy waits for the pages of a step."""
    found = Rows()
    for row in rows:
        resident = rows.first(way=RESIDENT, stream=row["stream"]) or {}
        longer = {name: (row[name]["median"] - resident[name]["median"]) / 1e3 for name in NAMES if resident}
        waits = {f"waits_{name}": late for name, late in longer.items() if row["way"] in (EXPOSED, HIDDEN)}
        found.append({**row, **waits, "clock": row["time"]["clock"], "count": row["time"]["n"]})
    return found


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("a loader's copies of 4 MiB while 1.56 B parameters train; ms ({clock})", rows,
        {"on": "stream", "beside": lambda row: f"{row['state']}, {row['way']}".removeprefix(", "),
        "a copy": ms("time"), "p10 to p90": spread_ms("time"), "p99": ms("p99"),
        "waits": formatted("waits_time", "{:.2f}"), "waits, p99": formatted("waits_p99", "{:.2f}"),
        "copies": formatted("count", "{:,.0f}")})  # fmt: skip
    for stream in (OWN, MODELS_STREAM):
        for state in ("int8", "float32"):
            for what, column, most in (("median", "waits_time", 1.0), ("p99", "waits_p99", 2.0)):
                page.bar(f"{state}, hidden: a copy on {stream} waits, {what}",
                    rows.where(state=state, way=HIDDEN, stream=stream), column, at_most=most, unit="ms")  # fmt: skip
