"""Tables of the commands on narrow terminals."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from experiments.harness import show
from pagedopt.commands import tables
from pagedopt.commands.train import progress_report, spill


def test_tables_keep_their_units_on_60_columns() -> None:
    times = {"median": 123.45, "p10": 123.4, "p90": 125.3}
    places = {"host": 13 << 20, "file": 22 << 30}
    ours = {
        "optimizer": "PagedAdamW", "final_train_loss": 1.2345, "validation_loss": 1.2345, "tokens_per_second": 123456.7,
        "optimizer_step_ms": times, "whole_step_ms": times, "state_bytes": places, "state": "resident",
        "measured_bytes": places, "losses": [1.2345], "queued": False,
    }  # fmt: skip
    for table in (progress_report.table, spill.table):
        words = []
        for width in (60, 300):
            console = Console(width=width)
            with console.capture() as captured:
                console.print(table([ours, ours]))
            rows = [line for line in captured.get().splitlines() if line.startswith("│")]
            assert all(len(row) <= width for row in rows)
            words.append(sorted(re.findall(r"[^\s│]+", " ".join(rows))))
        assert words[0] == words[1]
        assert "GiB" in words[0]


def test_an_output_that_is_no_terminal_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("70", 70), ("", 130), ("wide", 130)):
        monkeypatch.setenv("COLUMNS", columns)
        assert tables.console(130).width == width
        assert show.console().width == (70 if width == 70 else 180)
