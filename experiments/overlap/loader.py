"""How long does a copy of a data loader wait beside a step?

A copy engine serves in order and knows no priorities: a copy of 4 MiB to the device stands behind the pages that were
asked for before it.  A thread copies at random moments, as loaders do, on a stream of its own, while the model trains;
what is timed begins when the GPU could begin the copy and ends when it has arrived.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from experiments.lab import Bar, Row, Rows, Run, Table, formatted, ms, over, ratio, series, spread_ms
from experiments.overlap.iteration import EXPOSED, HIDDEN, MODELS, RESIDENT, maker
from experiments.works.training import Load, Mark, Training
from pagedopt.planning.sizes import SIZES

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "step", "paging", "overlap")
PIECE = 4 << 20
#: Seconds between two copies, at most.
APART = 0.02
ALONE = "nothing"
PLAN = (("float32", RESIDENT), ("int8", EXPOSED), ("int8", HIDDEN), ("float32", HIDDEN))


class Copies:
    """Copies of a thread: ``with`` starts it, and ends it.

    Attributes:
        took: microseconds of each copy.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.took: list[float] = []
        self._device, self._end = device, threading.Event()
        self._here = torch.ones(PIECE, dtype=torch.uint8, pin_memory=on_gpu)
        self._there = torch.empty_like(self._here, device=device)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def __enter__(self) -> Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()

    def times(self, clock: str) -> Row:
        """All copies as a series, and what one of a hundred exceeds."""
        return {"time": series(self.took, clock), "p99": series([np.percentile(self.took, 99)], clock)}

    def _copy(self) -> None:
        apart = random.Random(0)
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            while not self._end.is_set():
                begin = Mark(self._device)
                self._there.copy_(self._here, non_blocking=True)
                end = Mark(self._device)
                if self._stream is not None:
                    self._stream.synchronize()
                self.took.append(end.since(begin))
                time.sleep(apart.uniform(0, APART))


def measure(run: Run) -> Iterator[Row]:
    """A row per format of state and way; first one with nothing beside the copies."""
    with Copies(run.device) as alone:
        time.sleep(run.size(2.0, 0.1))
    clock = "GPU" if run.device.type == "cuda" else "wall"
    yield {"state": "", "way": ALONE, **alone.times(clock)}
    for state, way in run.each(PLAN):
        with run.attempt(f"{state}, {way}"):
            training = Training(run.device, SIZES[run.size(MODELS["1.56 B"], "tiny")], Load(), maker(way, state))
            if way == HIDDEN:
                training.optimizer.attach(training.model)
            for _ in range(3):
                training.iterate()
            training.wait()
            with Copies(run.device) as copies:
                for _ in range(run.size(20, 2)):
                    training.iterate()
                training.wait()
            yield {"state": state, "way": way, **copies.times(clock)}
            del training


def derive(rows: Rows) -> Rows:
    """How much longer than alone: what a copy waits."""
    alone = rows.first(way=ALONE) or {}
    found = Rows()
    for row in rows:
        waits = {name: (row[name]["median"] - alone["time"]["median"]) / 1e3 for name in ("time", "p99")}
        found.append({
            **row, "clock": row["time"]["clock"], "count": row["time"]["n"],
            "of_alone": over(row["time"], alone["time"]), "waits": waits["time"], "waits_p99": waits["p99"],
        })  # fmt: skip
    return found


TABLES = [
    Table("a loader's copies of 4 MiB while 1.56 B parameters train; ms ({clock})", {
        "beside": lambda row: f"{row['state']}, {row['way']}".removeprefix(", "), "a copy": ms("time"),
        "p10 to p90": spread_ms("time"), "÷ alone": ratio("of_alone"), "waits": formatted("waits", "{:.2f}"),
        "waits, p99": formatted("waits_p99", "{:.2f}"), "copies": formatted("count", "{:,}"),
    }),
]  # fmt: skip
BARS = [
    Bar(f"{state}, hidden: a loader's copy waits, {what}", column, at_most=most, unit="ms", state=state, way=HIDDEN)
    for state in ("int8", "float32")
    for what, column, most in (("median", "waits", 1.0), ("p99", "waits_p99", 2.0))
]
