"""Every experiment runs from its command to its tables, pictures and note, with toys on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_runs import asked, experiment, run_quick, shown
from nvrtc_support import nvrtc

from experiments.harness import note, question
from experiments.harness.show import Table

#: One run for ``make test``: whatever the harness does for all of them is in it.
FIRST = "pointer_transports"
EVERY = [
    pytest.param(each.name, marks=() if each.name == FIRST else pytest.mark.long)
    for each in question.every()
    if not all(q.needs_gpu for q in each.questions)
]
#: Of which a part compiles CUDA, without a GPU, too.
WITH_NVRTC = ("jit_or_aot", "vertical_fusion")
#: Columns by question that toys on a CPU have not: of a GPU, and of a first step that compiles for good.
NOT_OF_TOYS = {
    "eager": {"kernels", "launches", "copies", "held", "warnings", "operators"},
    "first_call": {"built"},
    "fsdp2": {"floor"},
}
#: What is right of toys, too: it is counted.
MET = {
    "optimizer_ladder": (
        "the loop launches M x N, off by",
        "foreach's extra is one intermediate of its group, off by",
    ),
    "vertical_fusion": ("square of square: bytes by the model, off from what they must be",),
}


@pytest.mark.parametrize("name", EVERY)
def test_toys_are_measured_on_a_cpu(name: str, tmp_path: Path) -> None:
    if name in WITH_NVRTC:
        nvrtc()
    found, of = run_quick(name, tmp_path), experiment(name)
    assert list(found["parts"]) == [q.name for q in of.questions if not q.needs_gpu]
    assert any("GPU" in line for line in found["left_out"]) or not any(q.needs_gpu for q in of.questions)
    for part, known in found["parts"].items():
        assert known["complete"]
        assert known["rows"]
        rows = shown(part, known["rows"])
        for table in (table for table in asked(part).listed("TABLES") if isinstance(table, Table)):
            there = {column for row in rows.where(**table.where) for column in row}
            named = {column for column in table.columns.values() if isinstance(column, str)}
            named -= NOT_OF_TOYS.get(part, set())
            assert not there or named <= there, "a table asks for a column that is not measured"
    met = {bar["work"]: bar["met"] for bar in found["verdicts"]}
    assert all(met[title] for title in MET.get(name, ()))
    if (page := note.NOTES / f"{of.note}.md").exists():
        copied = tmp_path / "note.md"
        copied.write_text(page.read_text())
        note.fill(copied, note.sections(found, of))  # has a place for everything
