"""Real runs of experiments, with toys on a CPU, and what is made of the files that are committed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from children import run
from paths import ROOT
from pictures import can_draw

from experiments.harness import note, question, rows
from experiments.harness.main import KEPT, main


def run_quick(name: str, out: Path, plots: Sequence[str] = (), more: Sequence[str] = ()) -> dict[str, Any]:
    """Results of ``python -m experiments NAME --quick --device cpu``, whose plots are there."""
    command = ["-m", "experiments", name, "--quick", "--device", "cpu", "--out", out, *more]
    no_card = {"CUDA_VISIBLE_DEVICES": ""}  # to name it takes some of its memory
    done = run(*command, timeout=110, cwd=ROOT, **no_card)
    assert done.returncode == 0, done.stderr
    name = name.replace("-", "_")
    found = dict(json.loads((out / f"{name}-cpu.json").read_text()))
    assert {"commit", "dirty"} <= found["machine"].keys()
    assert ("a note is not filled from that" in done.stdout) is (found["machine"]["dirty"] is not False)
    assert all(set(bar) >= {"work", "measured", "limit", "met"} for bar in found["verdicts"])
    drawn = sorted(f"{name}-cpu-{p}.png" for p in plots) if can_draw() else []
    assert sorted(p.name for p in out.glob("*.png")) == drawn
    return found


def experiment(name: str) -> question.Experiment:
    """By its name."""
    found = question.find(name)
    assert found is not None
    return found[0]


def judged(name: str, machine: str) -> int:
    """How many bars a committed file has, whose verdicts come out again, number for number, from its rows."""
    asked = experiment(name)
    result = rows.read(KEPT / f"{name}-{machine}.json", asked)
    known = rows.of_questions(result, asked)
    assert known
    verdicts = [bar.verdict(known.get(q.name)) for q in asked.questions for bar in q.listed("BARS")]
    again = {verdict.work: verdict.as_dict() for verdict in verdicts}
    for verdict in result["verdicts"]:
        assert again[verdict["work"]] == verdict
    return len(result["verdicts"])


def regenerated(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--note`` of a page's experiments makes what is committed between the markers, but for what changed since.

    No block is empty.
    """
    committed = (ROOT / "notes" / f"{page}.md").read_text()
    assert not re.search(r"<!-- begin (.*) -->\s*<!-- end \1 -->", committed)
    (tmp_path / f"{page}.md").write_text(emptied(committed))
    monkeypatch.setattr(note, "NOTES", tmp_path)
    for asked in (found for found in question.every() if found.note == page):
        assert main(asked, ["--note"]) == 0
    assert undated((tmp_path / f"{page}.md").read_text()) == undated(committed)


def undated(text: str) -> str:
    """A page without what has changed since it was measured: any edit may add to that, and only a release asks."""
    return re.sub(r"; what has changed since is unknown|; [\w ,]+ changed since| Changed since: [^.\n]+\.", "", text)


def emptied(text: str) -> str:
    """A note with nothing between its markers."""
    kept: list[str] = []
    outside = True
    for line in text.splitlines(keepends=True):
        outside = outside or line.startswith("<!-- end")
        if outside:
            kept.append(line)
        outside = outside and not line.startswith("<!-- begin")
    return "".join(kept)
