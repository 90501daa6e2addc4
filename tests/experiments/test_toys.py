"""Every question is measured with toys on a CPU, and its report says something of what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nvrtc_support import nvrtc
from pictures import can_draw

from experiments import kept
from experiments.__main__ import run
from experiments.lab import Table

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
