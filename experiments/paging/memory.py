"""What does a step take beyond parameters and gradients, on the device and on the host?

Answer (H200, 2026-11): on the device its budget and, staged, its ring of 67 MB, and not a page more; on the host the
state that is there and up to 40 MB.

Taken is what is free before an optimizer is made, less the least that is free until its third step has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.harness.columns import gb, mib
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table
from experiments.works.paged import PAGED, Problem, adamw, away_bytes, placed
from pagedopt.system.files.host import numbers

NEEDS_GPU = True
#: Shares of state on the device.
SHARES = (0.0, 0.25, 0.5)
STEPS = 3
#: Seconds between two looks.
PAUSE = 0.001


class Lowest:
    """The least that a reading was while this was open, read on a thread of its own."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.read, self.value, self.looks = read, read(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Lowest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _look(self) -> None:
        self.value = min(self.value, self.read())
        self.looks += 1

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._look()
            time.sleep(PAUSE)


def host_available() -> int:
    """Bytes of host memory that the kernel calls available."""
    return 1024 * numbers(Path("/proc/meminfo").read_text())["MemAvailable"]


def measure(run: Run) -> Iterator[Row]:
    """Rows of (way, share): bytes taken on both sides, beside budget, ring and what had to go to the host."""
    problem = Problem(run)
    params = problem.parameters()
    for name, options in run.each(PAGED.items()):
        with run.attempt(f"{name}, to load its kernels"):
            _steps(problem, params, options, 0)  # what the first step ever loads is not the state's
        for share in SHARES:
            with run.attempt(f"{name}, {share:.0%}"):
                row = {"way": name, "share": share, **_steps(problem, params, options, share)}
                run.say(f"{name}, {share:.0%} on the device: {beyond(row):,} bytes beyond what is allowed")
                yield row


def _steps(problem: Problem, params: list[torch.nn.Parameter], options: dict[str, Any], share: float) -> Row:
    """The least that was free while an optimizer was made and took steps, against what was free before."""
    run = problem.run
    run.free()
    torch.cuda.reset_peak_memory_stats(run.device)
    budget = int(share * problem.state_bytes)
    before, host_before = torch.cuda.mem_get_info(run.device)[0], host_available()
    cached = torch.cuda.memory_reserved(run.device)
    with Lowest(lambda: torch.cuda.mem_get_info(run.device)[0]) as device, Lowest(host_available) as host:
        optimizer = adamw(params, device_budget=budget, **options)
        for _ in range(STEPS):
            optimizer.step()
        torch.cuda.synchronize()
    report = optimizer.memory_report()
    return {
        "budget": budget, "device_extra": before - device.value, "host_extra": host_before - host.value,
        "torch_extra": torch.cuda.max_memory_reserved(run.device) - cached, "away": away_bytes(report),
        "looks": device.looks, **placed(report),
    }  # fmt: skip


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    return [{name: cell for name, cell in row.items() if not isinstance(cell, dict)} for row in part["rows"]]


def beyond(row: Row) -> int:
    """Bytes of the device that were taken and not allowed; below zero if none were."""
    return int(row["device_extra"] - row["budget"] - row["ring"])


TABLES = [
    Table("memory that an optimizer and three steps take", {
        "way": lambda row: f"{row['way']}, {row['share']:.0%} on the device", "budget, GB": gb("budget"),
        "ring, GB": gb("ring"), "device taken, GB": gb("device_extra"), "beyond, MiB": mib(beyond),
        "state on the host, GB": gb("away"), "host taken, GB": gb("host_extra"),
    })
]  # fmt: skip


def worst(rows: Rows) -> float:
    """The most MiB that were not allowed."""
    return max(beyond(row) for row in rows) / 2**20


# The driver gives memory in pieces of 2 MiB, and its own page tables for the state's pages are in the reading.
BARS = [Bar("device memory taken beyond budget and ring, worst way and share", worst, at_most=2, unit="MiB")]
