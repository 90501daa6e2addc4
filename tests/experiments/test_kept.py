"""Results that are kept: bars and pages come out of them again, number for number, and fit a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from experiment_runs import can_draw, emptied, experiment, made_of, undated
from kernel_texts import nvrtc

from experiments import kept
from experiments.__main__ import main, run
from experiments.lab import Table
from experiments.pictures import digest

FILES = [pytest.param(path, id=path.stem) for path in sorted(kept.KEPT.glob("*.json"))]
NOTED = sorted({each.note for each in kept.every() if (kept.NOTES / f"{each.note}.md").exists()})


def read(path: Path) -> tuple[dict, kept.Experiment]:  # type: ignore[type-arg]
    of = experiment(json.loads(path.read_text())["experiment"])
    return kept.read(path, of), of


@pytest.mark.parametrize("path", FILES)
def test_verdicts_come_out_again(path: Path) -> None:
    """Of every bar that was stored when it was measured, number for number."""
    result, of = read(path)
    kept.check_source(result, path.name)
    found = {bar.title: bar for page in kept.pages(result, of).values() for bar in page.bars}
    for bar in result.get("verdicts", ()):
        if bar["work"] in found:  # of a question that was not measured nothing is said
            title, *numbers = found[bar["work"]]
            stored = {"work": title, **dict(zip(("measured", "limit", "unit", "at_least"), numbers, strict=True))}
            assert {**stored, "met": found[title].met} == bar


@pytest.mark.parametrize("page", NOTED)
def test_a_page_comes_out_again(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its markers; no block is empty."""
    committed = (kept.NOTES / f"{page}.md").read_text()
    assert not re.search(r"<!-- begin (.*) -->\s*<!-- end \1 -->", committed)
    (tmp_path / f"{page}.md").write_text(emptied(committed))
    monkeypatch.setattr(kept, "NOTES", tmp_path)
    for each in (each for each in kept.every() if each.note == page):
        kept.fill_from(kept.newest(kept.KEPT, each.name), each)
    assert undated((tmp_path / f"{page}.md").read_text()) == undated(committed)


def test_a_picture_is_made_of_the_rows_that_are_kept() -> None:
    pictures = {
        path.with_name(f"{path.stem}-{name}.png"): digest(rows)
        for path in kept.KEPT.glob("*.json")
        for page in kept.pages(*read(path)).values()
        for name, rows, *_ in page.pictures
    }
    stale = [path.name for path, wanted in pictures.items() if not path.exists() or made_of(path) != wanted]
    assert not stale, "python -m experiments NAME --note"
    assert pictures.keys() | {kept.KEPT / "budgets.png"} == set(kept.KEPT.glob("*.png"))


@pytest.mark.parametrize("path", FILES)
def test_tables_fit_a_page(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([read(path)[1].name, "--show", str(path)]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines() if line[:1] in "┏┃┡│└") <= 110


# --- every question is measured with toys on a CPU, and its report says something of what it has measured -------------


#: Toys of no more than two seconds.
SHORT = ("eager", "owners", "counts")
#: What toys measure of it is read by a claim, and is on no page.
CLAIMED = ("generated",)
#: Questions that compile CUDA, without a GPU, too.
WITH_NVRTC = ("spill",)
ON_CPU = [
    pytest.param(experiment, name, id=name, marks=() if name in SHORT else pytest.mark.long)
    for experiment in kept.every()
    for name in experiment.on("cpu")
]


@pytest.mark.parametrize(("experiment", "name"), ON_CPU)
def test_toys_are_measured_on_a_cpu(experiment: kept.Experiment, name: str, tmp_path: Path) -> None:
    if name in WITH_NVRTC:
        nvrtc()
    assert run(experiment, name, ["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / f"{experiment.name}-cpu.json").read_text())
    part, module = found["parts"][name], experiment.questions[name]
    assert part["complete"]
    assert part["rows"]
    page = kept.page(name, module, part)
    assert page.blocks or page.pictures or name in CLAIMED
    for block in (block for blocks in page.blocks.values() for block in blocks):
        assert not isinstance(block, Table) or any(cell not in ("", "-") for line in block.lines for cell in line[1:])
    assert {path.name for path in tmp_path.glob("*.png")} == (
        {f"{experiment.name}-cpu-{name}.png" for name, *_ in page.pictures} if can_draw() else set()
    )


def test_what_needs_a_gpu_is_left_out_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paged = kept.find("paged_state")
    assert paged
    assert run(paged[0], "link", ["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "link, sweep, graph, rivals, memory: need a GPU" in capsys.readouterr().out
