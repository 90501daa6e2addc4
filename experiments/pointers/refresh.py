"""What does it cost in Python to compare every address of one list with the table, nothing having changed?

Answer (H200 host, 2026-11): 106 µs for 1,000 tensors, 13.8 ms for 65,536: a fifth to a third of what torch's
own copies of the list take.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from experiments.lab import Case, Page, Row, Rows, Run
from experiments.works import ways
from experiments.works.tiny_lists import Lists

MEASURES = ("launch", "tables")


def measure(run: Run) -> Iterator[Row]:
    """A row per count; the host's work alone."""
    for count in ways.each_count(run):
        work = Lists(1, count, run.device)
        case = Case("refresh", functools.partial(work.sweep.refresh, work.tensors))
        yield {"count": count, "host": run.host([case])["refresh"]}


def derive(rows: Rows) -> Rows:
    """One line of a grid."""
    return Rows({**row, "way": "µs"} for row in rows)


def report(page: Page, rows: Rows) -> None:
    """A table."""
    ways.on_grid(page, "comparing the addresses of one list in Python (refresh)", rows, "host")
