"""A page: bars can be missed, numbers have three digits, tables and pictures show what rows have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pictures import needs_matplotlib

from experiments import pictures
from experiments.comparing import best, on_one_clock, over
from experiments.lab import Page, Rows, Table, Verdict, number, words
from experiments.pictures import Bars, Lines
from experiments.works import witnesses


def stats(median: float, clock: str = "wall") -> dict[str, Any]:
    return {"clock": clock, "median": median, "p10": median / 2, "p90": 2 * median, "n": 9}


ROWS = Rows([
    {"way": "a", "n": 10, "wall": stats(5.0), "gpu": stats(1.0, "GPU")},
    {"way": "b", "n": 10, "wall": stats(7.0), "gpu": None},
    {"way": "a", "n": 2000, "wall": stats(1234.0), "gpu": stats(2.0, "GPU")},
])  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "limit", "at_least", "said"),
    [
        (1.0, 1.0, False, ("≤ 1 x", "1 x", "met")),
        (1.01, 1.0, False, ("≤ 1 x", "1.01 x", "NOT met")),
        (0.99, 1.0, True, ("≥ 1 x", "0.99 x", "NOT met")),
        (None, 1.0, True, ("≥ 1 x", "-", "not measured here")),
        (18.0, 19, False, ("≤ 19 x", "18 x", "met")),
    ],
)
def test_a_bar_can_be_missed(measured: float | None, limit: float, at_least: bool, said: tuple[str, ...]) -> None:
    assert Verdict("work", measured, limit, "x", at_least).words()[1:] == said


def test_numbers_have_three_digits_and_counts_all() -> None:
    values = (1234.5, 99.94, 12.34, 1.234, None, 16, 5_242_880, 16.0, 1.0)
    assert [number(value) for value in values] == [
        "1,234", "99.9", "12.3", "1.23", "-", "16", "5,242,880", "16.0", "1",
    ]  # fmt: skip
    assert [words({"n": n}, "n") for n in (64, 64.0, {"median": 64.0})] == ["64", "64.0", "64.0"]


def test_the_worst_row_decides_a_bar() -> None:
    page = Page("question")
    page.bar("bar", ROWS, "wall", "≤ 1 µs")
    page.bar("bar", ROWS, "wall", "≥ 1.5 µs")
    page.bar("bar", ROWS.where(way="b"), "gpu", "≥ 1")
    page.bar("bar", ROWS.where(way="c"), len, "≥ 1")
    page.bar("bar", ROWS, lambda rows: (1.0, " (here)"), "≤ 1,048,576 B")
    assert [(bar.title, bar.measured) for bar in page.bars] == [
        ("bar", 1234), ("bar", 5), ("bar", None), ("bar", None), ("bar (here)", 1.0),
    ]  # fmt: skip
    assert [(bar.limit, bar.unit, bar.at_least) for bar in page.bars[1::3]] == [
        (1.5, "µs", True),
        (1_048_576, "B", False),
    ]
    with pytest.raises(ValueError, match="the limit is '< 2'; give one as"):
        page.bar("bar", ROWS, "wall", "< 2")


def test_a_table_has_a_line_per_row_and_a_grid_one_per_way() -> None:
    page = Page("question")
    page.table("{way}, {n}", ROWS, {"way": "way", "µs": "wall", "GPU": "gpu"}, by=("way",))
    page.grid("grid", ROWS, "way", "n", "wall", "n")
    page.grid("grid", Rows(), "way", "n", "wall", "n")
    page.table("none", Rows(), {"way": "way"})
    first, second, grid = page.blocks["question"]
    assert first == Table("a, 10", ["way", "µs", "GPU"], [["a", "5", "1"], ["a", "1,234", "2"]])
    assert isinstance(second, Table)
    assert second.full() == Table("b, 10", ["way", "µs"], [["b", "7"]])
    assert grid == Table("grid", ["n", "10", "2,000"], [["a", "5", "1,234"], ["b", "7", "-"]])


@pytest.mark.parametrize(
    ("code", "report", "words"),
    [
        (-9, [], "ncu was stopped after 200 s"),
        (9, ["==PROF== 0", "==ERROR== LaunchFailed"], "ncu shut down the process that it watched: LaunchFailed"),
        (1, [], "ncu ended with 1: the output's end"),
    ],
)
def test_counters_that_are_not_there_say_why(code: int, report: list[str], words: str) -> None:
    assert witnesses.why_not(code, report, ["the output's end"]) == words


def test_times_of_two_clocks_are_not_compared() -> None:
    assert {row["clock"] for row in on_one_clock(ROWS)} == {"wall"}
    assert {row["clock"] for row in on_one_clock(ROWS.where(way="a"))} == {"GPU"}
    assert over(ROWS[2]["wall"], ROWS[0]["wall"]) == 1234 / 5
    assert best(ROWS[1])["clock"] == "wall"
    with pytest.raises(ValueError, match="says nothing"):
        over(ROWS[0]["wall"], ROWS[0]["gpu"])


@needs_matplotlib
def test_pictures_name_their_axes_and_have_no_legend(tmp_path: Path) -> None:
    page = Page("question")
    rows = Rows(
        {"name": name, "n": time, "time": stats(time)} for name, time in zip("abc", (3.0, 1.0, 7.0), strict=True)
    )
    page.picture("both", rows, [Bars(title="bars", name="name", length="time", unit="ms", line="b"),
                                Lines(title="lines", x="n", y="time", each="name")])  # fmt: skip
    page.picture("none", Rows(), [])
    (path,) = pictures.save_all(page, tmp_path / "x.json")
    assert path == tmp_path / "x-both.png"
    figure = pictures.new_figure(8, 5)
    pictures.onto(figure, rows, page.pictures[0][2])
    bars, lines = figure.axes
    assert [name.get_text() for name in bars.get_yticklabels()] == ["a", "c"], "the shortest on top, b a line"
    assert (bars.get_xlabel(), lines.get_ylabel(), bars.get_legend()) == ("ms, wall", "µs, wall (log)", None)
    assert figure.get_supxlabel() == pictures.WHISKERS
