"""Times as rows have them, and a run of toys on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from experiments.clock import series
from experiments.lab import Run

CPU = torch.device("cpu")


def clocks(wall: float, gpu: float | None = None) -> dict[str, Any]:
    """Times (µs) as a row has them."""
    times = {"host": series([wall], "host"), "wall": series([wall], "wall")}
    return {**times, "gpu": None if gpu is None else series([gpu], "GPU")}


def quick_run() -> Run:
    return Run(CPU, True)
