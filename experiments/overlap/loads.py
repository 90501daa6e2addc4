"""What do micro-batches and a larger batch change, where state of 1.56 B parameters is on the host?

Only the first forward of a step comes behind its update.  A larger batch has a longer forward, and hides more; its
activations are computed twice, so that they fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Page, Row, Rows, Run
from experiments.overlap.iteration import EXPOSED, HIDDEN, RESIDENT, derive, of_plan, shown
from experiments.works.training import Load

__all__ = ["derive", "measure", "report"]

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
MICRO, LARGE = Load(micro=4), Load(batch=32, recomputed=True)
PLAN = (
    *(("1.56 B", load, "float32", way) for load in (LARGE, MICRO) for way in (RESIDENT, EXPOSED, HIDDEN)),
    *(("1.56 B", MICRO, "int8", way) for way in (EXPOSED, HIDDEN)),
)


def measure(run: Run) -> Iterator[Row]:
    """A row per load and way."""
    yield from of_plan(run, PLAN)


def report(page: Page, rows: Rows) -> None:
    """A table, and what is held to a limit."""
    shown(page, rows, rows.where(load=str(LARGE)))
    page.bar("1.56 B, float32, 32 sequences: hidden over resident",
        rows.where(load=str(LARGE), way=HIDDEN), "of_resident", at_most=1.05, unit="x")  # fmt: skip
    page.bar("1.56 B, int8, 4 micro-batches: hidden over resident",
        rows.where(load=str(MICRO), state="int8", way=HIDDEN), "of_resident", at_most=1.02, unit="x")  # fmt: skip
