"""The tables of all commands."""

from __future__ import annotations

import os
import sys

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

ENDLESS = 10_000


def console(width: int) -> Console:
    """Where to print: as wide as the terminal or as $COLUMNS says, else ``width``."""
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if told else width)


class FittingTable(Table):
    """Where it would not fit it gives up the space around its cells and breaks lines between words alone, so that
    numbers keep their digits and their units."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = Measurement.get(console, options.update(max_width=ENDLESS), self).maximum
        if wanted > options.max_width:
            self.padding = 0
            for column in self.columns:
                words = [word for cell in (column.header, *column.cells) for word in str(cell).split()]
                column.min_width = max(map(len, words), default=0)
        yield from super().__rich_console__(console, options)


def say(console: Console, line: str) -> None:
    """Print a line of prose: broken between words on a terminal, whole where a program may read it."""
    console.print(line, highlight=False, soft_wrap=not console.is_terminal)


__all__ = ["FittingTable", "console", "say"]
