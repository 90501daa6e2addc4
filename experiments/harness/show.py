"""Tables, bars and texts as values: a question declares them, the harness makes a terminal's and a note's of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from experiments.harness.rows import Column, Row, Rows, cell, number_in
from pagedopt.commands import tables

#: A title, headings, and lines of cells.
Shown = tuple[str, Sequence[str], Sequence[Sequence[str]]]
#: A text with fields of the first row ("{work}, {device}"), or a function of the rows.
Title = str | Callable[[Rows], str]


def number(value: float | None) -> str:
    """Three digits, and thousands separated; of a count, an int, all of them."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def words(row: Row, column: Column) -> str:
    """A cell as a table shows it: texts as they are, numbers in three digits, of a measured one the median."""
    found = cell(row, column)
    if isinstance(found, str):
        return found
    return number(found if isinstance(found, int) else number_in(row, lambda _: found))


def times(row: Row) -> str:
    """host / GPU / wall, in µs."""
    return " / ".join(number(number_in(row, clock)) for clock in ("host", "gpu", "wall"))


def _titled(title: Title, rows: Rows) -> str:
    return title(rows) if callable(title) else title.format_map(rows[0])


@dataclass(frozen=True)
class Table:
    """A line per row.

    Attributes:
        columns: heading → column; headings, too, may have fields of the first row ("ms, {clock}").
        by: a table for each group of rows that are alike in these columns.
        where: only rows with these values.
    """

    title: Title
    columns: Mapping[str, Column]
    by: Sequence[str] = ()
    where: Mapping[str, Any] = field(default_factory=dict)

    def shown(self, rows: Rows) -> Iterator[Shown]:
        """Every table that has a line."""
        for group in rows.where(**self.where).groups(*self.by):
            lines = [[words(row, column) for column in self.columns.values()] for row in group]
            headings = tuple(heading.format_map(group[0]) for heading in self.columns)
            yield _titled(self.title, group), headings, lines


@dataclass(frozen=True)
class Grid:
    """A line per value of one column, across it the values of another.

    Attributes:
        cell: what stands where they meet.
        corner: the heading of the lines.
        heading: how a value across is written.
        where: only rows with these values.
    """

    title: Title
    down: str
    across: str
    cell: Column
    corner: str
    heading: Callable[[Any], str] = "{:,}".format
    where: Mapping[str, Any] = field(default_factory=dict)

    def shown(self, rows: Rows) -> Iterator[Shown]:
        """The table, if it has a line."""
        if not (rows := rows.where(**self.where)):
            return
        over = sorted(rows.values(self.across))
        known = {(row[self.down], row[self.across]): words(row, self.cell) for row in rows}
        lines = [[str(name), *(known.get((name, value), "-") for value in over)] for name in rows.values(self.down)]
        yield _titled(self.title, rows), (self.corner, *map(self.heading, over)), lines


@dataclass(frozen=True)
class Text:
    """A sentence or a list made of rows.

    Attributes:
        section: of the note: the question's own, or another to which several questions may add lines.
        say: None or "" where there is nothing to say.
    """

    section: str
    say: Callable[[Rows], str | None]


@dataclass(frozen=True)
class Verdict:
    """A number to reach, and what was measured: None where it could not be."""

    work: str
    measured: float | None
    limit: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None if nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "met": self.met}

    def words(self) -> tuple[str, str, str, str]:
        """Work, bar, measured, verdict."""
        sign = "≥" if self.at_least else "≤"
        found = self.measured
        if found is not None and isinstance(self.limit, int) and float(found).is_integer():
            found = int(found)  # whole, where the limit is: a count
        measured = "-" if found is None else f"{number(found)} {self.unit}".strip()
        verdict = {True: "met", False: "NOT met", None: "not measured here"}[self.met]
        return self.work, f"{sign} {number(self.limit)} {self.unit}".strip(), measured, verdict


#: A number, or one with a remark that goes behind the bar's title, or None: not measured.
Measured = float | tuple[float, str] | None


class Bar:
    """A number to reach.

    Args:
        title: what is held to it.
        value: a column (of several rows that have a number in it the worst decides), or a function of the rows.
        at_least: the least that will do, or
        at_most: the most.
        unit: of both.
        where: only rows with these values.
    """

    def __init__(
        self,
        title: str,
        value: str | Callable[[Rows], Measured],
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "",
        **where: Any,
    ) -> None:
        if (at_least is None) == (at_most is None):
            raise TypeError(f"bar {title!r}: give at_least or at_most")
        self.title, self.value, self.unit, self.where = title, value, unit, where
        self.limit, self.at_least = (at_most, False) if at_least is None else (at_least, True)

    def verdict(self, rows: Rows | None) -> Verdict:
        """What rows say to it; nothing was measured where there are none."""
        found = self._measured(rows.where(**self.where)) if rows else None
        number, remark = found if isinstance(found, tuple) else (found, "")
        assert self.limit is not None
        return Verdict(self.title + remark, number, self.limit, self.unit, self.at_least)

    def _measured(self, rows: Rows) -> Measured:
        if not rows:
            return None
        if callable(self.value):
            return self.value(rows)
        found = [value for row in rows if (value := number_in(row, self.value)) is not None]
        return (min if self.at_least else max)(found, default=None)


def console() -> Console:
    """Where to print: wide enough for the tables where the output goes into a file."""
    return tables.console(180)


def show(out: Console, shown: Shown) -> None:
    """Print a table whose first column is text and whose others are numbers."""
    title, headings, lines = shown
    out.print(f"\n{title}", style="bold", highlight=False, markup=False, soft_wrap=True)
    table = RichTable()
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    out.print(table)


def show_verdicts(out: Console, verdicts: Sequence[Verdict], toys: bool = False) -> None:
    """Print the bars; of toys, that they are."""
    table = RichTable("work", title="bars")
    for heading in ("bar", "measured"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    styles = {True: "green", False: "bold red", None: "dim"}
    for verdict in verdicts:
        *cells, word = verdict.words()
        met = None if toys else verdict.met
        table.add_row(*cells, "toy" if toys and verdict.met is not None else word, style=styles[met])
    out.print(table)
