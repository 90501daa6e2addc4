"""The puzzlers gave seven reasons not to leave fusion to a compiler: which of them hold today?

Answer (H200, torch 2.11, 2026-11): compile time and logging do; bugs in usual programs, memory, dynamic shapes and
horizontal fusion do not, and slower shapes are 0 or 1 of 12 (a softmax, 1.08 x), by run.

A small test each (:mod:`experiments.launch.compiler`).  A reason holds where its test finds what it says, however
seldom.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.harness.rows import Row, Rows, number_in
from experiments.harness.run import Run
from experiments.harness.show import Table, Text, number
from experiments.launch.compiler import REASONS, forget


def measure(run: Run) -> Iterator[Row]:
    """A row per reason: a number, what it says, whether the reason holds."""
    run.rounds, run.seconds = run.size((40, 0.5), (3, 0.1))
    for reason, (test, in_a_moment) in run.each(REASONS.items()):
        if run.quick and run.device.type == "cpu" and not in_a_moment:
            run.leave_out(f"{reason}: needs a GPU, or longer than toys may take")
            continue
        with run.attempt(reason, (Exception,)):
            yield {"reason": reason, "asked": test.__doc__, "device": run.device.type, **test(run)}
        forget()


def verdict(row: Row) -> str:
    """True or not."""
    return "true" if row["holds"] else "no longer true"


def counted(row: Row) -> str:
    """The number with its unit."""
    return f"{number(number_in(row, 'number'))} {row['unit']}"


def sentence(rows: Rows) -> str:
    """How many."""
    gone = [row["reason"] for row in rows if not row["holds"]]
    return f"Of {len(rows)} reasons that were tried, {len(gone)} no longer hold: {', '.join(gone) or 'none'}."


TABLES = [
    Table("seven reasons against the compiler, {device}", {
        "reason": "reason", "today": verdict, "number": counted, "found": "says",
    })
]  # fmt: skip
TEXTS = [Text("reasons", sentence)]
