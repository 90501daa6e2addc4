"""Columns as tables show them: in units, in formats, with their spread."""

from __future__ import annotations

from collections.abc import Callable

from experiments.lab import Column, Row, cell, number, number_in

Shown = Callable[[Row], str]


def in_units(column: Column, unit: float) -> Callable[[Row], float | None]:
    """A column divided by a unit; None where there is no number."""
    return lambda row: None if (found := number_in(row, column)) is None else found / unit


def formatted(column: Column, pattern: str, missing: str = "-") -> Shown:
    """A column in a format, as "{:.2f} x"; of a series the median.

    >>> formatted("share", "{:.1f} %")({"share": 12.34})
    '12.3 %'
    """
    return lambda row: missing if (found := number_in(row, column)) is None else pattern.format(found)


def ms(column: Column) -> Callable[[Row], float | None]:
    """A column of µs in ms."""
    return in_units(column, 1e3)


def mib(column: Column) -> Callable[[Row], float | None]:
    """A column of bytes in MiB."""
    return in_units(column, 2**20)


def percent(column: Column, pattern: str = "{:.1f} %") -> Shown:
    """A column of percent."""
    return formatted(column, pattern)


def ratio(column: Column) -> Shown:
    """A column of ratios."""
    return formatted(column, "{:.2f} x")


def error(column: Column = "error") -> Shown:
    """A column of errors; nothing where none is known."""
    return formatted(column, "{:.1e}", "")


def spread(column: Column, low: str = "p10", high: str = "p90") -> Shown:
    """A series: its median, and from where to where most of it lies."""
    ends, pattern = ("median", low, high), "{} ({} to {})"
    return lambda row: pattern.format(*(number(x[e]) for e in ends)) if (x := cell(row, column)) else "-"


def last_line(column: Column = "ended") -> Shown:
    """Of a text the last line, as much as a table has room for; nothing where there is no text."""
    return lambda row: ((cell(row, column) or "").strip().splitlines() or [""])[-1][:120]


def gb_per_s(nbytes: Column, time: Column) -> Callable[[Row], float | None]:
    """A column of bytes over one of µs; None where one of them is missing or nothing was moved.

    >>> gb_per_s("moved", "time")({"moved": 3e9, "time": 1e6})
    3.0
    """

    def rate(row: Row) -> float | None:
        moved, taken = number_in(row, nbytes), number_in(row, time)
        return moved / taken / 1e3 if moved and taken else None

    return rate
