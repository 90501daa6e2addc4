"""How long is a piece of string?  A question for tests of the harness; what goes wrong is an option."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from experiments.harness.plot import Lines, Plot
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Grid, Table, Text
from experiments.harness.time import Case


def options(parser: argparse.ArgumentParser) -> None:
    """What goes wrong, behind the first row."""
    parser.add_argument("--wrong", choices=("interrupt", "raise", "refuse"))


def measure(run: Run) -> Iterator[Row]:
    """Rows of two lengths and two ways."""
    for length in run.each(run.size((100, 200), (1, 2))):
        for name, timing in run.measure([Case(way, lambda: None) for way in ("cut", "torn")]).items():
            yield {"length": length, "way": name, **timing}
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


def old(result: dict[str, Any]) -> list[Row] | None:
    """Rows from before there were layouts."""
    return result.get("pieces")


def say(rows: Rows) -> str:
    """How many."""
    return f"- {len(rows)} pieces"


TABLES = [
    Table("{way}", {"length": "length", "µs": "wall", "double": "double"}, by=("way",)),
    Grid("grid", down="way", across="length", cell="wall", corner="pieces"),
]
BARS = [Bar("long enough", "double", at_least=100, unit="m", way="cut"), Bar("slow", "wall", at_most=1e9, way="glued")]
PLOTS = [Plot("lengths", [Lines("wall", x="length", y="wall", each="way")])]
TEXTS = [Text("answer", say)]
