"""hidden_step: toys on a CPU run the loop; what follows from times is worked out from rows whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.overlap import iteration, streams
from experiments.overlap.iteration import EXPOSED, HIDDEN, RESIDENT
from experiments.works.trace import Event


@pytest.fixture
def run() -> Run:
    return Run(torch.device("cpu"), True, Console(quiet=True))


def test_toys_hide_pages(run: Run) -> None:
    exposed, hidden, nearly = iteration.derive(Rows(iteration.measure(run)))
    assert not run.left_out
    assert (exposed["way"], hidden["way"], nearly["way"]) == (EXPOSED, HIDDEN, iteration.NEARLY)
    assert hidden["pages_hidden"] > 0
    assert hidden["plain"] == 0
    assert hidden["of_exposed"] == pytest.approx(hidden["time"]["median"] / exposed["time"]["median"])


def row(way: str, time: float, **more: Any) -> dict[str, Any]:
    parts = {name: {"clock": "GPU", "median": part} for name, part in zip(iteration.PARTS, (70, 140, 10), strict=True)}
    measured, host = {"clock": "GPU", "median": time}, {"clock": "host", "median": 1000.0}
    about = {"model": "355 M", "load": "8", "state": "float32", "way": way}
    return {**about, "time": measured, "step_host": host, **parts, **more}


@pytest.mark.parametrize(
    ("late", "estimate"),
    [pytest.param(180.0, 400, id="of a parameter"), pytest.param(100.0, 220 + 240 - 70, id="longer than the forward")],
)
def test_the_estimate_is_forward_backward_clipping_and_what_is_late(late: float, estimate: float) -> None:
    rows = Rows([row(RESIDENT, 220), row(EXPOSED, 460), row(HIDDEN, 410, late={"clock": "GPU", "median": late})])
    _, _, hidden = iteration.derive(rows)
    assert hidden["estimate"] == estimate
    assert hidden["of_estimate"] == pytest.approx(410 / estimate)
    assert hidden["of_resident"] == pytest.approx(410 / 220)
    assert hidden["of_exposed"] == pytest.approx(410 / 460)


@pytest.mark.parametrize(
    ("name", "kind", "lane"),
    [
        ("void multi_tensor_apply<Bucket>(Table)", "kernel", "updates"),
        ("multi_tensor_apply_blocks_small_grid", "kernel", "updates"),
        ("void at::native::multi_tensor_apply_kernel<LpNorm>", "kernel", "model"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", "copies up"),
        ("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", "copies down"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "model"),
    ],
)
def test_lanes(name: str, kind: str, lane: str) -> None:
    assert streams.lane_of(Event(name, kind, 0.0, 1.0)) == lane


def test_spans_close_to_each_other_are_one() -> None:
    events = [Event("gemm", "kernel", start, 1000.0) for start in (3000.0, 4050.0, 9000.0)]
    assert streams.spans(events)["model"] == [[0.0, 2.05], [6.0, 7.0]]
