"""What a question is written with: rows and clocks, what is measured, tables, pictures and bars."""

from __future__ import annotations

from experiments.harness.columns import (
    error,
    formatted,
    gb,
    gb_per_s,
    last_line,
    mib,
    ms,
    percent,
    ratio,
    spread,
    spread_ms,
    yes_or_no,
)
from experiments.harness.panels import BLUE, GRAY, ORANGE, PURPLE, Bars, Lines, Panel
from experiments.harness.plot import Plot
from experiments.harness.rows import Column, Row, Rows, best, by_clock_of, on_one_clock, on_own_clock, over
from experiments.harness.run import Run
from experiments.harness.show import Bar, Grid, Table, Text, console, number, times
from experiments.harness.time import Case, cycles_per_us, measure, series
