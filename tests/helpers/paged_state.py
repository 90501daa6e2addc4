"""Rows of the experiment on paged state, and what is shown of them."""

from __future__ import annotations

from typing import Any

from experiment_runs import experiment

from experiments.harness import rows
from experiments.harness.main import KEPT
from experiments.harness.rows import Row, Rows
from experiments.harness.show import Verdict

PAGED_STATE = experiment("paged_state")
QUESTIONS = {question.name: question for question in PAGED_STATE.questions}


def kept() -> dict[str, list[Row]]:
    """Rows of an H200 by question."""
    parts = rows.read(KEPT / "paged_state-nvidia-h200.json", PAGED_STATE)["parts"]
    return {name: part["rows"] for name, part in parts.items()}


def derived(name: str, measured: list[Row]) -> Rows:
    """Rows of a question with what it derives from them."""
    found: Rows = QUESTIONS[name].derive(Rows(measured))
    return found


def verdicts(name: str, found: Rows) -> list[Verdict]:
    """What rows of a question say to its bars."""
    return [bar.verdict(found) for bar in QUESTIONS[name].listed("BARS")]


def shown(name: str, measured: list[Row]) -> Rows:
    """Rows with what is derived, of which tables, texts and verdicts can be made."""
    found = derived(name, measured)
    for table in QUESTIONS[name].listed("TABLES"):
        for _, headings, lines in table.shown(found):
            assert lines
            assert all(len(line) == len(headings) for line in lines)
    for text in QUESTIONS[name].listed("TEXTS"):
        text.say(found)
    verdicts(name, found)
    return found


def slower(row: Row, times: float) -> Row:
    """A row whose series are so many times as long."""

    def cell(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: times * each if isinstance(each, float) else each for name, each in value.items()}

    return {name: cell(value) for name, value in row.items()}
