"""What does a norm per tensor cost through one list of pointers, and in ``torch._foreach_norm`` around its old limit?

Answer (H200, 2026-11): nothing breaks at 422 any more.  For 424 tensors torch takes less of the host (756 µs to our
1,749, as our table is built anew in every call) and more of the GPU (17 µs to 13; for 1,000 tensors 37 to 15).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

import pagedopt
from experiments.lab import Case, Page, Row, Rows, Run
from experiments.pictures import BLUE, GRAY, Lines
from experiments.works import ways
from experiments.works.trace import counted

MEASURES = ("launch", "tables")
COUNTS = (10, 100, 423, 424, 1000, 4096, 16384, 65536)
#: Of so many tensors kernels are counted.
FEW = 1000
WAYS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "torch": lambda tensors: list(torch._foreach_norm(tensors, 2)),
    "pagedopt": lambda tensors: pagedopt.foreach_norm(tensors, 2),
}


def measure(run: Run) -> Iterator[Row]:
    """A row per count and way, after its norms were held to float64."""
    timed: list[tuple[Row, Callable[[], object]]] = []
    for count in ways.each_count(run, COUNTS):
        # A buffer row each, as in a table of small layers; ours and torch's see the same tensors.
        tensors = list(torch.rand(count, 128, device=run.device)[:, :6].unbind())
        exact = torch.linalg.vector_norm(torch.stack(tensors).double(), dim=1)
        for name, way in WAYS.items():
            torch.testing.assert_close(torch.stack(way(tensors)).double(), exact, rtol=1e-5, atol=0, msg=name)
        calls = {name: functools.partial(way, tensors) for name, way in WAYS.items()}
        cases = [Case(name, call, repeats=4 if count <= FEW else 1) for name, call in calls.items()]
        for name, timing in run.measure(cases).items():
            timed.append(({"count": count, "way": name, "launches": None, **timing}, calls[name]))
    for row, call in timed:  # last: launches behind a trace are slower
        if row["count"] <= FEW and row["way"] == "torch" and run.device.type == "cuda":
            with run.attempt(f"kernels of torch's norm of {row['count']:,} tensors"):
                row["launches"] = counted(call).kernels
        yield row


def derive(rows: Rows) -> Rows:
    """What has a number of launches, marked."""
    return Rows({**row, "counted": bool(row["launches"])} for row in rows)


COLORS = {"torch": GRAY, "pagedopt": BLUE}
TITLE = "Norms of N tiny tensors, by torch and through one list of pointers"
PANEL = Lines(title=TITLE, x="count", y="wall", each="way", label="tensors", colors=COLORS.__getitem__)


def report(page: Page, rows: Rows) -> None:
    """Tables and a picture."""
    ways.on_grid(page, "norms of N tensors: wall µs", rows, "wall")
    ways.on_grid(page.detail, "norms of N tensors: GPU µs", rows, "gpu")
    ways.on_grid(page.detail, "kernels that torch._foreach_norm launches", rows.where(counted=True), "launches")
    page.picture("norms", rows, [PANEL])
