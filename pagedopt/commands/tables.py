"""What commands and experiments show: a console, tables, and an empty figure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

ENDLESS = 10_000


def console(width: int, markup: bool = True) -> Console:
    """Return a console as wide as the terminal or $COLUMNS. If neither is there, it has ``width`` columns.

    Without ``markup`` it prints ``[b]``, as a path may have it, as it is.
    """
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else width, markup=markup, emoji=False)


class FittingTable(Table):
    """A table that drops the padding of its cells and breaks lines only between words if it is too wide.

    Numbers thus keep all their digits and their units.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = Measurement.get(console, options.update(max_width=ENDLESS), self).maximum
        if wanted > options.max_width:
            self.padding = 0
            for column in self.columns:
                words = [word for cell in (column.header, *column.cells) for word in str(cell).split()]
                column.min_width = max(map(len, words), default=0)
        yield from super().__rich_console__(console, options)


def numbers(headings: Sequence[str]) -> list[Column]:
    """Return columns of numbers, which are aligned right."""
    return [Column(heading, justify="right") for heading in headings]


def results_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of rows that map headings to cells. The first column holds names, the others numbers."""
    name, *others = rows[0]
    table = FittingTable(name, *numbers(others))
    for row in rows:
        table.add_row(*row.values())
    return table


def say(console: Console, line: str, whole: bool = False) -> None:
    """Print a line of prose, broken between words on a terminal.

    It stays whole in a file or a pipe, and with ``whole`` on a terminal too, so that its paths can be copied.
    """
    console.print(line, highlight=False, soft_wrap=whole or not console.is_terminal)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, sized in inches, that needs no display. Return None if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
