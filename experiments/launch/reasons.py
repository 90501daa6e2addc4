"""The puzzlers gave seven reasons not to leave fusion to a compiler: which of them hold today?

Answer (H200, torch 2.11, 2026-11): compile time and logging do; bugs in usual programs, memory, dynamic shapes and
horizontal fusion do not, and slower shapes are 0 or 1 of 12 (a softmax, 1.08 x), by run.

A small test each (:mod:`experiments.launch.compiler`).  A reason holds where its test finds what it says, however
seldom.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Column, Row, Rows, Run, Table, Text, number
from experiments.launch.compiler import REASONS
from experiments.works.slices import forget


def measure(run: Run) -> Iterator[Row]:
    """A row per reason: a number, what it says, whether the reason holds."""
    run.rounds, run.seconds = run.size((40, 0.5), (3, 0.1))
    for reason, test in run.each(REASONS.items()):
        if run.quick and run.device.type == "cpu" and not reason.quick:
            run.leave_out(f"{reason.name}: needs a GPU, or longer than toys may take")
            continue
        with run.attempt(reason.name, (Exception,)):
            yield {"reason": reason.name, "device": run.device.type, **test(run)}
        forget()


def sentence(rows: Rows) -> str:
    """How many."""
    gone = [row["reason"] for row in rows if not row["holds"]]
    return f"Of {len(rows)} reasons that were tried, {len(gone)} no longer hold: {', '.join(gone) or 'none'}."


COLUMNS: dict[str, Column] = {
    "reason": "reason",
    "today": lambda row: "true" if row["holds"] else "no longer true",
    "number": lambda row: f"{number(row['number'])} {row['unit']}",
    "found": "says",
}
TABLES = [Table("seven reasons against the compiler, {device}", COLUMNS)]
TEXTS = [Text("reasons", sentence)]
