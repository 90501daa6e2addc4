"""Columns as tables show them: µs in ms, bytes in GB or MiB, percent, a ratio, a median with its spread."""

from __future__ import annotations

from collections.abc import Callable

from experiments.harness.rows import Column, Row, Series, cell, number_in
from experiments.harness.show import number
from experiments.harness.time import PERCENTILES

Shown = Callable[[Row], str]


def in_units(column: Column, unit: float) -> Callable[[Row], float | None]:
    """A column in units of so much; None where there is no number."""

    def value(row: Row) -> float | None:
        found = number_in(row, column)
        return None if found is None else found / unit

    return value


def ms(column: Column) -> Callable[[Row], float | None]:
    """A column of µs in ms."""
    return in_units(column, 1e3)


def mib(column: Column) -> Callable[[Row], float | None]:
    """A column of bytes in MiB."""
    return in_units(column, 2**20)


def gb(column: Column) -> Shown:
    """A column of bytes in GB; less than half a megabyte is 0."""
    found = in_units(column, 1e9)
    return lambda row: "0" if abs(found(row) or 1) < 5e-4 or found(row) == 0 else number(found(row))


def formatted(column: Column, pattern: str, missing: str = "-") -> Shown:
    """A column in a format, as "{:.2f} x"; of a series the median.

    >>> formatted("share", "{:.1f} %")({"share": 12.34})
    '12.3 %'
    """

    def text(row: Row) -> str:
        found = number_in(row, column)
        return missing if found is None else pattern.format(found)

    return text


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

    def text(row: Row) -> str:
        found = cell(row, column)
        return "{} ({} to {})".format(*(number(found[end]) for end in ("median", low, high))) if found else "-"

    return text


def spread_ms(column: Column) -> Shown:
    """From where to where most of a series of µs lies, in ms."""

    def text(row: Row) -> str:
        found = cell(row, column)
        return "-" if found is None else " to ".join(number(found[end] / 1e3) for end in ("p10", "p90"))

    return text


def yes_or_no(column: Column) -> Shown:
    """A column of truth."""
    return lambda row: "yes" if cell(row, column) else "no"


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


def series_in_ms(column: str) -> Callable[[Row], Series | None]:
    """A column of series of µs, as series of ms."""

    def scaled(row: Row) -> Series | None:
        found = row.get(column)
        return found and {name: value / 1e3 if name in PERCENTILES else value for name, value in found.items()}

    return scaled
