"""Two checkouts are compared in processes of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from experiments import two_trees
from experiments.report import ROOT


@pytest.mark.long
def test_a_step_that_is_slower_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(ROOT / "pagedopt", other / "pagedopt", ignore=shutil.ignore_patterns("__pycache__"))
    base = other / "pagedopt" / "optim" / "base.py"
    slow = base.read_text().replace("        loss = None\n", "        loss = __import__('time').sleep(0.05)\n", 1)
    base.write_text(slow)
    options = ["--other", str(other), "--quick", "--device", "cpu", "--out", str(tmp_path)]
    assert two_trees.main(options) == 0
    rows = json.loads((tmp_path / "two_trees-cpu.json").read_text())["rows"]
    assert [row["work"] for row in rows] == ["40 x (2, 3)", "40 x (2, 3), away"]
    for row in rows:
        assert row["other"]["min"] > 50_000
        assert row["ratio"] == row["this"]["min"] / row["other"]["min"] < 0.5
    assert "40 x (2, 3), away" in capsys.readouterr().out


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        two_trees.main(["--other", str(tmp_path), "--device", "cpu"])
    assert caught.value.code == 2
