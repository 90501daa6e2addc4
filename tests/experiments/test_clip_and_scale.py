"""What clipping and scaling cost: a real run of toys, and what is made of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiment_runs import run_quick
from ladder_rows import clocks

from experiments.harness.rows import Rows
from experiments.step import clip_and_scale
from experiments.step.clip_and_scale import BYTES, CLIP, GIVEN, GPT2, SCALE, TORCH, UNSCALED, WAYS
from experiments.works.contenders import COPY, OURS


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("clip-and-scale", tmp_path, plots=["steps"])
    rows = found["parts"]["clip_and_scale"]["rows"]
    every = {(way.what, way.name) for way in WAYS if way.on_cpu and not way.slow}
    assert {(row["what"], row["case"]) for row in rows if row["case"] != COPY} == every
    assert all(row["error"] < 5e-5 and row["operators"] is not None for row in rows if row["case"] != COPY)
    assert {row["bytes"] // row["numel"] for row in rows if row["what"] == CLIP} == {BYTES[CLIP]}


def row(case: str, time: float, what: str = CLIP) -> dict[str, Any]:
    about = {"key": GPT2, "work": "GPT-2", "what": what, "case": case, "device": "cuda", "numel": 1, "bytes": 32}
    return {**about, "error": None, "launches": 3, **clocks(2 * time, time)}


def test_times_are_over_the_copy_and_torch_in_the_same_place() -> None:
    clipped = [row(OURS, 107), row(COPY, 100), row(TORCH, 214)]
    scaled = [row(GIVEN, 51, SCALE), row(UNSCALED, 50, SCALE), row(COPY, 25, SCALE)]
    found = clip_and_scale.derive(Rows(clipped + scaled))
    ours = found.first(case=OURS) or {}
    assert (ours["of_copy"], ours["of_torch_wall"]) == pytest.approx((1.07, 0.5))
    given = found.first(case=GIVEN) or {}
    assert (given["of_copy"], given["of_unscaled"]) == pytest.approx((2.04, 1.02))
    assert given["of_torch_wall"] is None
