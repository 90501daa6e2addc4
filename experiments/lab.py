"""What a question is written with: rows, the run that measures them, and the page that shows them.

A question is a module: its docstring has the question and the answer, ``measure(run)`` yields rows, and
``report(page, rows)`` says what they show.  ``derive(rows)``, where there is one, adds columns before that.
All timing is in :mod:`experiments.clock`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import torch

from experiments.clock import Case, measure

Item = TypeVar("Item")
Row = dict[str, Any]
#: A column's name, or a function of a row.
Column = str | Callable[[Row], Any]

# --- rows


class Rows(list[Row]):
    """Rows of one question.

    A cell is a number, a text, or a series.  A time or a ratio of times that is a plain number belongs to the clock
    that its row names (``clock``).
    """

    def where(self, **wanted: Any) -> Rows:
        """Those whose columns have these values."""
        return Rows(row for row in self if all(row.get(name) == value for name, value in wanted.items()))

    def first(self, **wanted: Any) -> Row | None:
        """The first with these values, or None."""
        return next(iter(self.where(**wanted)), None)

    def number(self, column: Column, **wanted: Any) -> float | None:
        """A cell of the first row with these values, or None if there is no such row or no number in it."""
        row = self.first(**wanted)
        return None if row is None else number_in(row, column)

    def values(self, column: str) -> list[Any]:
        """The different values of a column, in the order in which they first stand there."""
        return list(dict.fromkeys(row[column] for row in self if column in row))

    def groups(self, *columns: str) -> Iterator[Rows]:
        """Rows that are alike in some columns, in the order in which they first stand there."""
        found: dict[tuple[Any, ...], Rows] = {}
        for row in self:
            found.setdefault(tuple(row.get(name) for name in columns), Rows()).append(row)
        yield from found.values()


def cell(row: Row, column: Column) -> Any:
    """A row's cell; None where the row has no such column."""
    return row.get(column) if isinstance(column, str) else column(row)


def number_in(row: Row, column: Column) -> float | None:
    """A cell as a number: of a measured one, the median."""
    found = cell(row, column)
    found = found["median"] if isinstance(found, Mapping) else found
    return None if found is None else float(found)


# --- columns as tables show them


def number(value: float | None) -> str:
    """Three digits, and thousands separated; of a count, an int, all of them."""
    if value is None or isinstance(value, int) or abs(value) >= 100:
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def words(row: Row, column: Column) -> str:
    """A cell as a table shows it: texts as they are, numbers in three digits, of a measured one the median."""
    found = cell(row, column)
    if isinstance(found, str):
        return found
    return number(found if isinstance(found, int) else number_in(row, lambda _: found))


# --- a run

#: What may go wrong with one contender without ending the question: a refusal, no room, a rival that is not there.
REFUSALS = (RuntimeError, MemoryError, ValueError, OSError, ImportError, NotImplementedError)


@dataclass(eq=False)
class Run:
    """What a question measures with.

    Attributes:
        quick: toys in place of sizes: a smoke test whose numbers mean nothing.
        options: values of the options that the question added.
        part: which question of a file that answers several.
        left_out: what was not measured, and why.
        known: rows of an earlier run, for a question with ``GOES_ON``; it yields again those that stay.
        rounds, seconds, warmup: what :meth:`measure` takes if not told otherwise; a question may set them.
    """

    device: torch.device
    quick: bool = False
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    part: str = ""
    left_out: list[str] = field(default_factory=list)
    known: Rows = field(default_factory=Rows)
    warmup: int = 3

    def __post_init__(self) -> None:
        self.rounds, self.seconds = (3, 0.1) if self.quick else (40, 3.0)

    def size(self, full: Item, toy: Item) -> Item:
        """A size, or what ``--quick`` has in its place."""
        return toy if self.quick else full

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items to measure one after the other, each in the memory that the last one gave back."""
        for i, item in enumerate(items):
            if i:
                self.free()
            yield item

    def measure(self, cases: Sequence[Case], **how: Any) -> dict[str, Any]:
        """The series ``host``, ``wall`` and ``gpu`` by name of case.

        ``how``: rounds, seconds, warmup or device of its own; a CPU times the host alone.
        """
        usual = {"rounds": self.rounds, "seconds": self.seconds, "warmup": self.warmup, "device": self.device}
        return measure(cases, **{**usual, **how})

    def time(self, cases: Sequence[Case], **columns: Any) -> Iterator[Row]:
        """A row per case: ``columns``, ``case``, and its times (:meth:`measure`)."""
        for name, timing in self.measure(cases).items():
            yield {**columns, "case": name, **timing}

    def say(self, text: str) -> None:
        """Print what was found so far."""
        print(f"  {text}", flush=True)

    def leave_out(self, text: str) -> None:
        """Say what is not measured, and why, here and in the results."""
        self.left_out.append(text)
        self.say(f"left out: {text}")

    @contextlib.contextmanager
    def attempt(self, name: str, errors: tuple[type[Exception], ...] = REFUSALS) -> Iterator[None]:
        """A contender that may fail: what it says is kept, its memory is given back, the others go on.

        Args:
            errors: what does not end the question; for a compiler, or other code that is not ours, any exception.
        """
        try:
            yield
        except errors as error:
            self.left_out.append(f"{name}: {type(error).__name__}: {str(error).strip()[:600]}")
            self.say(f"{name}: FAILED: {error}")
        finally:
            self.free()

    def free(self) -> None:
        """Give GPU memory back to the driver: managed memory is refused beyond a quarter of what is free."""
        if self.quick and self.device.type == "cpu":
            return  # toys need no room, and looking for garbage takes 0.3 s once torch.compile is loaded
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


# --- a page


class Table(NamedTuple):
    """As it is shown: a title, headings, and lines of cells."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    def full(self) -> Table:
        """Without columns that say nothing in any line."""
        said = [any(cell not in ("", "-") for cell in column) for column in zip(*self.lines, strict=True)]
        return Table(self.title, [*compress(self.headings, said)], [[*compress(line, said)] for line in self.lines])


class Verdict(NamedTuple):
    """A number to reach, and what was measured: None where it could not be."""

    title: str
    measured: float | None
    limit: float
    unit: str
    at_least: bool

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None if nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def words(self) -> tuple[str, str, str, str]:
        """Title, bar, measured, verdict."""
        found = self.measured
        if found is not None and isinstance(self.limit, int) and float(found).is_integer():
            found = int(found)  # whole, where the limit is: a count
        bar = f"{'≥' if self.at_least else '≤'} {number(self.limit)} {self.unit}".strip()
        measured = "-" if found is None else f"{number(found)} {self.unit}".strip()
        return self.title, bar, measured, {True: "met", False: "NOT met", None: "not measured here"}[self.met]


#: A number, or one with a remark that goes behind the bar's title, or None: not measured.
Measured = float | tuple[float, str] | None
#: With fields of the first row ("{work}, {clock}"), or a function of the rows.
Title = str | Callable[[Rows], str]


class Page:
    """What a report says, by section of a note.

    Attributes:
        bars: numbers to reach.
        pictures: name, rows, panels or a function that draws, title, and the columns by which panels are repeated.
    """

    def __init__(self, section: str) -> None:
        self.section = section
        self.blocks: dict[str, list[Table | str]] = {}
        self.bars: list[Verdict] = []
        self.pictures: list[tuple[str, Rows, Any, str, Sequence[str]]] = []

    def table(self, title: Title, rows: Rows, columns: Mapping[str, Column], by: Sequence[str] = ()) -> None:
        """A line per row, a table for each group of rows that are alike in ``by``.

        Headings may have fields of the first row, too.
        """
        for group in rows.groups(*by):
            lines = [[words(row, column) for column in columns.values()] for row in group]
            self._table(title, group, [heading.format_map(group[0]) for heading in columns], lines)

    def grid(
        self,
        title: Title,
        rows: Rows,
        down: str,
        across: str,
        cell: Column,
        corner: str,
        heading: Callable[[Any], str] = "{:,}".format,
    ) -> None:
        """A line per value of one column, across it the values of another, and ``cell`` where they meet."""
        if rows:
            over = sorted(rows.values(across))
            known = {(row[down], row[across]): words(row, cell) for row in rows}
            lines = [[str(name), *(known.get((name, value), "-") for value in over)] for name in rows.values(down)]
            self._table(title, rows, [corner, *map(heading, over)], lines)

    def _table(self, title: Title, rows: Rows, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        if any(cell not in ("", "-") for line in lines for cell in line[1:]):  # a CPU has no GPU times
            said = title(rows) if callable(title) else title.format_map(rows[0])
            self.blocks.setdefault(self.section, []).append(Table(said, headings, lines))

    def say(self, text: str | None, section: str = "") -> None:
        """A sentence or a list, behind the tables or in a section that questions share; nothing if it is empty."""
        if text:
            self.blocks.setdefault(section or self.section, []).append(text)

    def bar(self, title: str, rows: Rows, value: str | Callable[[Rows], Measured], limit: str) -> None:
        """A number to reach ("≥ 93 %"): of a column the worst row's, or a function's of all rows, if there are any."""
        if not (found := re.fullmatch(r"([≤≥]) ([\d.,]+(?:e-?\d+)?) ?(.*)", limit)):
            raise ValueError(f"bar {title!r}: the limit is {limit!r}; give one as '≤ 1.05 x' or '≥ 93 %'")
        sign, text, unit = found.groups()
        numbers = [x for row in rows if not callable(value) and (x := number_in(row, value)) is not None]
        measured: Measured = (max if sign == "≤" else min)(numbers, default=None)
        if callable(value):
            measured = value(rows) if rows else None
        measured, remark = measured if isinstance(measured, tuple) else (measured, "")
        number = text.replace(",", "")
        wanted = float(number) if re.search("[.e]", number) else int(number)
        self.bars.append(Verdict(title + remark, measured, wanted, unit, sign == "≥"))

    def picture(self, name: str, rows: Rows, draw: Any, title: str = "", by: Sequence[str] = ()) -> None:
        """One PNG, of panels (:mod:`experiments.pictures`) or by a function of an empty figure and the rows."""
        if rows:
            self.pictures.append((name, rows, draw, title, by))
