"""One optimizer on the CPU, with its state in RAM or in a file under a budget; prints what it took as JSON."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.paging.problem import adamw, digest, state_tensors
from experiments.paging.state_file import BEGIN, DONE, END, resident

PROCESS = Path("/proc/self")


def parameters(tensors: int, numel: int) -> list[torch.nn.Parameter]:
    """The same random parameters and gradients every time."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(tensors):
        parameter = torch.nn.Parameter(torch.empty(numel).normal_(0, 0.02, generator=generator))
        parameter.grad = torch.empty(numel).normal_(0, 1e-3, generator=generator)
        found.append(parameter)
    return found


def options(budget: int | None) -> dict[str, Any]:
    """Plain RAM, or a file of which so many bytes stay in RAM."""
    return {} if budget is None else {"placement": "file", "device_budget": budget}


def reset_high_water() -> None:
    """Let the kernel's high-water mark of the resident size begin anew."""
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def high_water() -> int | None:
    """The most bytes that were resident since then."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def main(arguments: Sequence[str]) -> int:
    """``state_file_child [TENSORS, NUMEL, BUDGET, STEPS]`` (JSON)"""
    tensors, numel, budget, steps = json.loads(arguments[0])
    params = parameters(tensors, numel)
    warm = parameters(1, 4096)
    for _ in range(2):  # compiles the kernel, wakes the threads: what the first step ever takes is not the state's
        adamw(warm, **options(None if budget is None else 0)).step()
    reset_high_water()
    before = resident()
    print(BEGIN, flush=True)
    optimizer = adamw(params, **options(budget))
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.step()
        taken.append((time.perf_counter() - begin) * 1e3)
    peak, after = high_water(), resident()
    print(DONE, flush=True)
    report = optimizer.memory_report()
    found = {
        "before": before, "high_water": peak, "after": after, "ms": taken, "by_place": dict(report.by_place),
        "measured": dict(report.measured), "digest": digest([*params, *state_tensors(optimizer)]),
    }  # fmt: skip
    print(END + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
