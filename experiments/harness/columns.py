"""Columns as tables show them: µs in ms, bytes in GB or MiB, percent."""

from __future__ import annotations

from collections.abc import Callable

from experiments.harness.rows import Column, Row, Rows, cell, number_in
from experiments.harness.show import number


def on_one_clock(rows: Rows) -> Rows:
    """Rows that are compared, with ``time`` (µs) by one ``clock``, "GPU" or "wall".

    The GPU's median where all that were timed have one, else the wall's of all.
    """
    timed = [row for row in rows if row.get("wall") is not None]
    clock = "GPU" if timed and all(row.get("gpu") is not None for row in timed) else "wall"
    return Rows({**row, "clock": clock, "time": by(clock, row)} for row in rows)


def by(clock: str, times: Row) -> float | None:
    """Of host, GPU and wall times the median of one; None where there is none."""
    return number_in(times, clock.lower())


def over(column: Column, unit: float) -> Callable[[Row], float | None]:
    """A column in units of so much; None where there is no number."""

    def value(row: Row) -> float | None:
        found = number_in(row, column)
        return None if found is None else found / unit

    return value


def ms(column: Column) -> Callable[[Row], float | None]:
    """A column of µs in ms."""
    return over(column, 1e3)


def mib(column: Column) -> Callable[[Row], float | None]:
    """A column of bytes in MiB."""
    return over(column, 2**20)


def spread_ms(column: Column) -> Callable[[Row], str]:
    """A column of measured µs: from where to where most of them lie, in ms."""

    def text(row: Row) -> str:
        found = cell(row, column)
        return "-" if found is None else " to ".join(number(found[end] / 1e3) for end in ("p10", "p90"))

    return text


def gb(column: Column) -> Callable[[Row], str]:
    """A column of bytes in GB; less than half a megabyte is 0."""

    def text(row: Row) -> str:
        found = number_in(row, column)
        return "0" if found is not None and abs(found) < 5e5 else number(None if found is None else found / 1e9)

    return text


def percent(column: Column, *, signed: bool = False) -> Callable[[Row], str]:
    """A column of percent, with its sign where ``signed``."""

    def text(row: Row) -> str:
        found = number_in(row, column)
        return "-" if found is None else f"{found:{'+' if signed else ''}.1f} %"

    return text
