"""What does it cost in Python to compare every address of one list with the table, nothing having changed?

Answer (H200 host, 2026-11): 106 µs for 1,000 tensors, 13.8 ms for 65,536: a fifth to a third of what torch's
own copies of the list take.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import number
from experiments.harness.time import Case
from experiments.works.tiny_lists import Lists
from experiments.works.ways import counts, on_grid, set_rounds


def measure(run: Run) -> Iterator[Row]:
    """A row per count; the host's work alone."""
    set_rounds(run)
    for count in run.each(counts(run)):
        work = Lists(1, count, run.device)
        case = Case("refresh", lambda work=work: work.sweep.refresh(work.tensors))  # type: ignore[misc]
        yield {"count": count, **run.measure([case], seconds=0.5, device=torch.device("cpu"))["refresh"]}


def derive(rows: Rows) -> Rows:
    """One line of a grid."""
    return Rows({**row, "way": "µs"} for row in rows)


def host(row: Row) -> str:
    """The host's time."""
    return number(row["host"]["median"])


TABLES = [on_grid("comparing the addresses of one list in Python (refresh)", host)]
