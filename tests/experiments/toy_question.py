"""How long is a piece of string?  A question for tests of the command line; what goes wrong is an option."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from experiments.clock import Case
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import Lines


def options(parser: argparse.ArgumentParser) -> None:
    """What goes wrong, behind the first row."""
    parser.add_argument("--wrong", choices=("interrupt", "raise", "refuse"))


def measure(run: Run) -> Iterator[Row]:
    """Rows of two lengths and two ways."""
    for length in run.each(run.size((100, 200), (1, 2))):
        for row in run.time([Case(way, lambda: None) for way in ("cut", "torn")], length=length):
            yield {**row, "way": row["case"]}
        if run.options.wrong == "interrupt":
            raise KeyboardInterrupt
        if run.options.wrong == "raise":
            raise ZeroDivisionError("no string")
        with run.attempt("glue"):
            if run.options.wrong == "refuse":
                raise MemoryError("no room")


def derive(rows: Rows) -> Rows:
    """Twice the length."""
    return Rows({**row, "double": 2 * row["length"]} for row in rows)


def report(page: Page, rows: Rows) -> None:
    """Two tables, a sentence, a picture, and two bars."""
    page.table("{way}", rows, {"length": "length", "µs": "wall", "double": "double"}, by=("way",))
    page.grid("grid", rows, "way", "length", "wall", "pieces")
    page.say(f"- {len(rows)} pieces", "answer")
    page.picture("lengths", rows, [Lines(title="wall", x="length", y="wall", each="way")])
    page.bar("long enough", rows.where(way="cut"), "double", "≥ 100 m")
    page.bar("slow", rows.where(way="glued"), "wall", "≤ 1000000000.0")
