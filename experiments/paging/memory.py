"""What does a step take beyond parameters and gradients, on the device and on the host?

Answer (H200, 2026-11): on the device its budget and, staged, its ring of 67 MB, and not a page more; on the host the
state that is there and up to 40 MB.

Taken is what is free before an optimizer is made, less the least that is free until its third step has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.columns import in_units
from experiments.lab import Column, Page, Row, Rows, Run, number
from experiments.works.paged import PAGED, WAY_AND_SHARE, Problem, adamw, away_bytes, placed
from pagedopt.system.host import numbers

NEEDS_GPU = True
MEASURES = ("paging", "placements")
#: Shares of state on the device.
SHARES = (0.0, 0.25, 0.5)
STEPS = 3


@contextlib.contextmanager
def watched(read: Callable[[], int], pause: float = 0.001) -> Iterator[list[int]]:
    """What is read before the block, every ``pause`` seconds in it, and behind it."""
    found, stop = [read()], threading.Event()

    def watch() -> None:
        while not stop.wait(pause):
            found.append(read())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found.append(read())


def host_available() -> int:
    """Bytes of host memory that the kernel calls available."""
    return 1024 * numbers(Path("/proc/meminfo").read_text())["MemAvailable"]


def measure(run: Run) -> Iterator[Row]:
    """Rows of (way, share): bytes taken on both sides, beside budget, ring and what had to go to the host."""
    problem = Problem(run)
    params = problem.parameters()
    for name, options in run.each(PAGED.items()):
        with run.attempt(f"{name}, to load its kernels"):
            _taken(problem, params, options, 0)  # what the first step ever loads is not the state's
        for share in SHARES:
            with run.attempt(f"{name}, {share:.0%}"):
                row = {"way": name, "share": share, **_taken(problem, params, options, share)}
                run.say(f"{WAY_AND_SHARE(row)}: {row['device_extra']:,} bytes taken there")
                yield row


def _taken(problem: Problem, params: list[torch.nn.Parameter], options: dict[str, Any], share: float) -> Row:
    """The least that was free while an optimizer was made and took steps, against what was free before."""
    device = problem.device
    problem.run.free()
    budget = int(share * problem.state_bytes)
    with watched(lambda: torch.cuda.mem_get_info(device)[0]) as near, watched(host_available) as host:
        optimizer = adamw(params, device_budget=budget, **options)
        for _ in range(STEPS):
            optimizer.step()
        torch.cuda.synchronize()
    report = optimizer.memory_report()
    return {
        "budget": budget,
        "device_extra": near[0] - min(near),
        "host_extra": host[0] - min(host),
        "away": away_bytes(report),
        "looks": len(near),
        **placed(report),
    }


def derive(rows: Rows) -> Rows:
    """MiB of the device that were taken and not allowed; below zero if none were."""
    return Rows({**row, "beyond": (row["device_extra"] - row["budget"] - row["ring"]) / 2**20} for row in rows)


def gb(column: str) -> Column:
    """A column of bytes in GB; less than half a megabyte is 0."""
    found = in_units(column, 1e9)
    return lambda row: "0" if (size := found(row)) is not None and abs(size) < 5e-4 else number(size)


COLUMNS: dict[str, Column] = {
    "way": WAY_AND_SHARE,
    "budget, GB": gb("budget"),
    "ring, GB": gb("ring"),
    "device used, GB": gb("device_extra"),
    "beyond, MiB": "beyond",
    "state on the host, GB": gb("away"),
    "host used, GB": gb("host_extra"),
}
# The driver gives memory in pieces of 2 MiB, and its own page tables for the state's pages are in the reading.


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("memory that an optimizer and three steps take", rows.where(share=0.0), COLUMNS)
    page.bar("device memory taken beyond budget and ring, worst way and share", rows, "beyond", "≤ 2 MiB")
