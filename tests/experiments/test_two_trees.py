"""Two checkouts are compared in processes of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from experiment_runs import experiment, run_quick
from paths import ROOT

from experiments import two_trees
from experiments.harness.main import main, parse
from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.harness.show import console


@pytest.mark.long
def test_a_step_that_is_slower_shows(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(ROOT / "pagedopt", other / "pagedopt", ignore=shutil.ignore_patterns("__pycache__"))
    base = other / "pagedopt" / "optim" / "base.py"
    slow = base.read_text().replace("        loss = None\n", "        loss = __import__('time').sleep(0.05)\n", 1)
    base.write_text(slow)
    found = run_quick("two_trees", tmp_path / "out", more=["--other", str(other)])
    rows = found["parts"]["two_trees"]["rows"]
    assert [row["work"] for row in rows] == ["40 x (2, 3)", "40 x (2, 3), away"]
    for row in rows:
        assert row["other"]["min"] > 50_000
        assert row["ratio"] == row["this"]["min"] / row["other"]["min"] < 0.5


def test_without_another_tree_it_is_this_one_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a clean clone has no other; said in the results."""
    trees = []

    class Dry(list[dict[str, object]]):
        ended = None

        def __init__(self, *_: object, tree: Path, **__: object) -> None:
            trees.append(tree)

    monkeypatch.setattr(two_trees, "Child", Dry)
    options = parse(experiment("two_trees"), ["--quick", "--device", "cpu"], None)
    run = Run(torch.device("cpu"), True, console(), options)
    assert list(two_trees.measure(run)) == []
    assert trees == [ROOT, ROOT]
    assert run.left_out == ["another tree: --other names none, so this one is compared with itself"]


def test_rows_are_compared_by_work_and_clock() -> None:
    times = {"other": ([4.0, 9.0], [1.0, 3.0]), "this": ([8.0, 6.0], [6.0, 1.0])}
    rows = Rows({"round": 0, "tree": tree, "work": "w", "host": h, "gpu": g} for tree, (h, g) in times.items())
    gpu, host = found = Rows(two_trees.compared(rows))
    assert (gpu["clock"], gpu["of"], gpu["ratio"]) == ("GPU", "median", 3.5 / 2)
    assert (host["clock"], host["of"], host["ratio"]) == ("host", "min", 6 / 4)
    assert not list(two_trees.compared(rows.where(tree="this"))), "one tree alone is compared with nothing"
    (table,) = two_trees.TABLES
    ((_, _, lines),) = table.shown(found)
    assert lines[1] == ["w", "host", "4.0 / 6.5", "6.0 / 7.0", "1.500", "min"]


def test_a_folder_without_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(experiment("two_trees"), ["--other", str(tmp_path), "--device", "cpu"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "there is no pagedopt in it" in error
    assert error.count("\n") == 1
