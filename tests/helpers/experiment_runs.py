"""Real runs of experiments, with toys on a CPU, and what is made of their rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from children import run
from paths import ROOT
from pictures import can_draw

from experiments.harness import question
from experiments.harness.plot import of_results
from experiments.harness.rows import Rows


def run_quick(name: str, out: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Results of ``python -m experiments NAME --quick --device cpu``, whose plots are there."""
    command = ["-m", "experiments", name.replace("_", "-"), "--quick", "--device", "cpu", "--out", out, *more]
    no_card = {"CUDA_VISIBLE_DEVICES": ""}  # to name it takes some of its memory
    done = run(*command, timeout=110, cwd=ROOT, **no_card)
    assert done.returncode == 0, done.stderr
    path = out / f"{name}-cpu.json"
    found = dict(json.loads(path.read_text()))
    assert {"commit", "dirty"} <= found["machine"].keys()
    assert ("a note is not filled from that" in done.stdout) is (found["machine"]["dirty"] is not False)
    assert all(set(bar) >= {"work", "measured", "limit", "met"} for bar in found["verdicts"])
    plots = of_results(found, experiment(name)) if can_draw() else []
    assert set(out.glob("*.png")) == {plot.target(path) for plot, rows in plots if rows.where(**plot.where)}
    return found


def experiment(name: str) -> question.Experiment:
    """By its name."""
    found = question.find(name)
    assert found is not None
    return found[0]


def asked(name: str) -> question.Question:
    """A question by its name."""
    (found,) = (q for q in experiment(name).questions if q.name == name)
    return found


def shown(name: str, measured: Sequence[dict[str, Any]]) -> Rows:
    """Rows of a question with what is derived, of which its tables, texts and verdicts can be made."""
    found: Rows = asked(name).derive(Rows(measured))
    for table in asked(name).listed("TABLES"):
        for _, headings, lines in table.shown(found):
            assert lines
            assert all(len(line) == len(headings) for line in lines)
    for text in asked(name).listed("TEXTS"):
        text.say(found)
    for bar in asked(name).listed("BARS"):
        bar.verdict(found)
    return found


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
