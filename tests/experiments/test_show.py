"""Bars can be missed, numbers have three digits, tables and plots show what rows have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pictures import needs_matplotlib

from experiments.harness import show
from experiments.harness.panels import Bars, Lines
from experiments.harness.plot import Plot
from experiments.harness.rows import Rows


@pytest.mark.parametrize(
    ("measured", "at_least", "met"), [(1.0, False, True), (1.01, False, False), (0.99, True, False), (None, True, None)]
)
def test_a_bar_can_be_missed(measured: float | None, at_least: bool, met: bool | None) -> None:
    verdict = show.Verdict("work", measured, 1.0, "x", at_least)
    assert verdict.met is met
    assert verdict.words()[3] == {True: "met", False: "NOT met", None: "not measured here"}[met]


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (99.94, "99.9"), (12.34, "12.3"), (1.234, "1.23"), (None, "-")]
)
def test_number(value: float | None, text: str) -> None:
    assert show.number(value) == text


def stats(median: float) -> dict[str, Any]:
    return {"clock": "wall", "median": median, "p10": median / 2, "p90": 2 * median, "n": 9}


ROWS = Rows([
    {"way": "a", "n": 10, "wall": stats(5.0), "gpu": stats(1.0), "host": stats(1.0)},
    {"way": "b", "n": 10, "wall": stats(7.0), "gpu": None, "host": stats(2.0)},
    {"way": "a", "n": 2000, "wall": stats(1234.0), "gpu": stats(1.0), "host": stats(3.0)},
])  # fmt: skip


def test_the_worst_row_decides_a_bar() -> None:
    def measured(**bar: Any) -> float | None:
        return show.Bar("bar", bar.pop("value", "wall"), **bar).verdict(ROWS).measured

    assert measured(at_most=1) == 1234
    assert measured(at_least=1) == 5
    assert measured(at_least=1, way="b") == 7
    assert measured(at_least=1, value="gpu", way="b") is None, "what has no number is not measured"
    assert measured(at_least=1, way="c") is None
    assert measured(at_least=1, value=len, way="a") == 2
    assert show.Bar("bar", lambda rows: (1.0, " (here)"), at_most=2).verdict(ROWS).work == "bar (here)"
    assert show.Bar("bar", len, at_most=2).verdict(None).met is None
    for limits in ({}, {"at_least": 1, "at_most": 2}):
        with pytest.raises(TypeError, match="give at_least or at_most"):
            show.Bar("bar", "wall", **limits)


def test_counts_are_whole_numbers() -> None:
    """16, not 16.0: of what was counted every digit is meant; of what was measured three are."""
    assert [show.number(value) for value in (16, 5_242_880, 16.0, 1.0)] == ["16", "5,242,880", "16.0", "1"]
    assert [show.words({"n": n}, "n") for n in (64, 64.0, {"median": 64.0})] == ["64", "64.0", "64.0"]
    bar = show.Bar("kernels", "kernels", at_most=19)
    assert bar.verdict(Rows([{"kernels": 18}])).words()[1:3] == ("≤ 19", "18")
    assert show.Verdict("share", 91.25, 85, "%", True).words()[1:3] == ("≥ 85 %", "91.2 %")
    assert show.Verdict("extra", 10.0, 12.5, "MiB").words()[1:3] == ("≤ 12.5 MiB", "10.0 MiB")


def test_a_table_has_a_line_per_row_and_a_grid_one_per_way() -> None:
    table = show.Table("{way}, {n}", {"way": "way", "µs": "wall", "twice": lambda row: 2 * row["n"]}, by=("way",))
    first, second = table.shown(ROWS)
    assert first == ("a, 10", ("way", "µs", "twice"), [["a", "5", "20"], ["a", "1,234", "4,000"]])
    assert second[2] == [["b", "7", "20"]]
    (grid,) = show.Grid("grid", down="way", across="n", cell=show.times, corner="n").shown(ROWS)
    assert grid[1] == ("n", "10", "2,000")
    assert grid[2] == [["a", "1 / 1 / 5", "3 / 1 / 1,234"], ["b", "2 / - / 7", "-"]]
    assert list(show.Grid("grid", down="way", across="n", cell="wall", corner="n").shown(Rows())) == []
    assert list(table.shown(Rows())) == []


@needs_matplotlib
def test_plots_are_drawn_as_far_as_there_are_rows(tmp_path: Path) -> None:
    lines = Plot("lines", [Lines(title=clock, x="n", y=clock, each="way") for clock in ("wall", "gpu", "host")])
    bars = Plot("bars", [Bars(title="{n}", name="way", length="wall", line="b")], by=("n",))
    for plot in (lines, bars):
        path = plot.save(tmp_path / "x.json", ROWS)
        assert path == tmp_path / f"x-{plot.name}.png"
        assert path.stat().st_size > 5000
        assert plot.save(tmp_path / "y.json", Rows()) is None
    assert len(list(tmp_path.iterdir())) == 2
