"""Times that are compared: by one clock, or not at all."""

from __future__ import annotations

from experiments.clock import Series
from experiments.lab import Row, Rows


def best(row: Row) -> Series:
    """The GPU's series if there is one, else the wall's."""
    return row["gpu"] or row["wall"]


def over(one: Series | None, other: Series | None) -> float | None:
    """How many times as long one series takes as another, by their medians; None where one is missing.

    Raises:
        ValueError: they are of two clocks.
    """
    if not one or not other:
        return None
    if one["clock"] != other["clock"]:
        raise ValueError(f"a time of the clock {one['clock']} over one of {other['clock']} says nothing")
    return float(one["median"] / other["median"])


def on_one_clock(rows: Rows) -> Rows:
    """Rows that are compared, with the series ``time`` by one ``clock``.

    The GPU's where all that were timed have one, else the wall's of all; None where a row was not timed.
    """
    timed = [row for row in rows if row.get("wall")]
    clock = "GPU" if timed and all(row.get("gpu") for row in timed) else "wall"
    return Rows({**row, "clock": clock, "time": row.get(clock.lower())} for row in rows)


def on_own_clock(rows: Rows) -> Rows:
    """Rows with the series ``time`` and its ``clock``: the GPU's where a row has one, else the wall's."""
    return Rows({**row, "time": best(row), "clock": best(row)["clock"]} for row in rows)


def by_clock_of(row: Row, other: Row | None) -> Series | None:
    """The series of another row by the clock that a row names; None if there is none."""
    return other and other[row["clock"].lower()]
