"""Tables of the commands on narrow terminals."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pagedopt.commands import contest, tables


def shown(width: int, *contenders: Any) -> list[str]:
    """The lines of what `train` says of contenders, without the head."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(contest.table(contenders, tokens=500))
    return [line for line in captured.get().splitlines() if line.startswith("│")]


def contender(**places: int) -> Any:
    """One of twelve steps, of which the last ten have other losses than the first."""
    return SimpleNamespace(
        name="PagedAdamW, 25%", losses=[5.0, 4.0, *[2.0, 3.0] * 5], step_ms=[900.0, 20.0, 30.0],
        optimizer_ms=[70.0, 3.0, 4.0], state_bytes=lambda: Counter(places),
    )  # fmt: skip


def test_a_row_is_of_late_losses_and_of_medians() -> None:
    rows = shown(120, contender(host=12 << 20), contender(host=5 << 20, file=7 << 20))
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    measured = ["PagedAdamW, 25%", "2.5000", "16,667", "4.00"]
    assert cells == [[*measured, "12.0 MiB", "0 B"], [*measured, "5.00 MiB", "7.00 MiB"]]


def test_a_step_that_not_all_have_taken_does_not_count() -> None:
    ahead, last = contender(host=5), contender(host=5)
    ahead.losses.append(99.0)
    assert [row.split("│")[2].strip() for row in shown(120, ahead, last)] == ["2.5000"] * 2


def test_tables_keep_their_units_on_60_columns() -> None:
    words = []
    for width in (60, 300):
        rows = shown(width, contender(host=13 << 20, file=22 << 30))
        assert all(len(row) <= width for row in rows)
        words.append(sorted(re.findall(r"[^\s│]+", " ".join(rows))))
    assert words[0] == words[1]
    assert "GiB" in words[0]


def test_an_output_that_is_no_terminal_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("70", 70), ("", 130), ("wide", 130)):
        monkeypatch.setenv("COLUMNS", columns)
        assert tables.console(130).width == width
