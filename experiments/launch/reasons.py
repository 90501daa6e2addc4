"""The puzzlers gave seven reasons not to leave fusion to a compiler: which of them hold today?

Answer (H200, torch 2.11, 2026-11): compile time and logging are shown.  Dynamic shapes are supported now, and lists of
foreach fused, so two reasons are gone.  Three say what may happen, and it was not seen: bugs in ten usual programs,
more memory, slower shapes (in 0 or 1 of 12, by run: a softmax, 1.08 x).

A small test each (:mod:`experiments.launch.compiler`).  A reason is shown where its test finds what it says, however
seldom.  One that says what may happen is not refuted by a test that does not find it.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Column, Page, Row, Rows, Run, number
from experiments.launch.compiler import REASONS
from experiments.works.slices import forget

#: Reasons with a hedge: "not all bugs", "can lead to", "can be".
HEDGED = ("bugs", "compile time", "memory", "slower for some shapes")
SHOWN, NOT_SEEN, GONE = "shown", "not seen here", "no longer"


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


def derive(rows: Rows) -> Rows:
    """What today says to each."""
    return Rows({**row, "today": today(row)} for row in rows)


def today(row: Row) -> str:
    """Of one reason."""
    return SHOWN if row["holds"] else NOT_SEEN if row["reason"] in HEDGED else GONE


def by_today(rows: Rows) -> dict[str, list[str]]:
    """Names of reasons by what today says to them."""
    return {word: [row["reason"] for row in rows.where(today=word)] for word in (SHOWN, NOT_SEEN, GONE)}


def sentence(rows: Rows) -> str:
    """Which are which."""
    parts = [f"{word}: {', '.join(names)}" for word, names in by_today(rows).items() if names]
    return f"Of {len(rows)} reasons that were tried: {'; '.join(parts)}."


COLUMNS: dict[str, Column] = {
    "reason": "reason",
    "today": "today",
    "number": lambda row: f"{number(row['number'])} {row['unit']}",
    "found": "says",
}


def report(page: Page, rows: Rows) -> None:
    """A table and what follows."""
    page.table("seven reasons against the compiler, {device}", rows, COLUMNS)
    page.say(sentence(rows))
