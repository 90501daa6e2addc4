"""Elements in 8 bits whose gradient stops, is small or comes rarely: a real run of toys, and what is made of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import judged, run_quick

from experiments.harness.rows import Rows
from experiments.step import rare_rows
from experiments.step.codes import FLOAT32, OURS
from experiments.step.rare_rows import PLAY, SIZES, TRAINING


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    rows = Rows(run_quick("rare_rows", tmp_path)["parts"]["rare_rows"]["rows"])
    assert [(row["beta1"], row["beta2"]) for row in rows.where(case=PLAY, code=FLOAT32)] == list(rare_rows.PAIRS)
    assert [row["code"] for row in rows.where(case=TRAINING)] == list(rare_rows.IN_TRAINING)
    for row in rows.where(case=PLAY):
        assert 0 < row["left after 2"] < row["left after 1"] < row["left after 0"] < 1.1, "in eight steps"
        assert row["most"] >= row["mean"] > 0
    assert len(next(iter(rare_rows.TABLES[0].shown(rare_rows.derive(rows))))[2]) == 27


def test_the_largest_updates_are_those_of_each_kind() -> None:
    update = torch.arange(12.0) - 5
    ended, small, tied = torch.tensor([[0], [1]]), torch.tensor([[2, 3], [11, 4], [5, 6]]), torch.tensor([[7]])
    found = rare_rows.largest(update, ended, small, tied)
    assert found == {"ended": 5, "tied": 2, **dict(zip((f"small {size:g}" for size in SIZES), (3, 6, 1), strict=True))}
    assert "ended" not in rare_rows.largest(update, None, small, tied)


def test_words_are_numbered_as_they_come() -> None:
    found = rare_rows.words(1000)
    seen = -1
    for number in found.tolist():
        assert number <= seen + 1
        seen = max(seen, number)
    assert 100 < seen < 1000


def row(case: str, code: str, mean: float, most: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "beta1": 0.9, "beta2": 0.999, "code": code, "mean": mean, "most": most, **more}


@pytest.mark.parametrize(("mean", "most", "tied", "met"), [(1.04, 1.9, 3.4, True), (0.94, 2.1, 3.6, False)])
def test_bars_are_met_or_missed(mean: float, most: float, tied: float, met: bool) -> None:
    rows = []
    for code, numbers in ((FLOAT32, (1.0, 1.0, 1.0)), (OURS, (mean, most, tied))):
        rows.append(row(PLAY, code, *numbers[:2], tied=numbers[2]))
        rows.append(row(TRAINING, code, *numbers[:2]))
    derived = rare_rows.derive(Rows(rows))
    assert [bar.verdict(derived).met for bar in rare_rows.BARS] == [met] * 5


def test_what_is_committed_comes_out_again() -> None:
    assert judged("rare_rows", "cpu") == 5
