"""Tables of the commands on narrow terminals."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from experiments.harness import show
from pagedopt.commands import tables
from pagedopt.commands.train import report


def test_tables_keep_their_units_on_60_columns() -> None:
    ours: Any = SimpleNamespace(
        name="PagedAdamW, 25%", losses=[1.2345], step_ms=[123.45], optimizer_ms=[123.45],
        state_bytes=lambda: Counter(host=13 << 20, file=22 << 30),
    )  # fmt: skip
    words = []
    for width in (60, 300):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(report.table([ours, ours], tokens=12345))
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
