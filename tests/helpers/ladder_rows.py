"""Rows of the ladder of optimizers, and what its bars make of them."""

from __future__ import annotations

from typing import Any

import torch
from experiment_runs import experiment

from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.harness.time import series

CPU = torch.device("cpu")


def verdicts(question: str, rows: Rows) -> dict[str, bool | None]:
    (asked,) = (q for q in experiment("optimizer_ladder").questions if q.name == question)
    return {bar.title: bar.verdict(asked.derive(rows)).met for bar in asked.listed("BARS")}


def clocks(wall: float, gpu: float | None = None) -> dict[str, Any]:
    """Times (µs) as a row has them."""
    times = {"host": series([wall], "host"), "wall": series([wall], "wall")}
    return {**times, "gpu": None if gpu is None else series([gpu], "GPU")}


def quick_run() -> Run:
    return Run(CPU, True, console())
