"""Part ``memory``: what a step takes beyond parameters and gradients, on the device and on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.paging.problem import Run, adamw, away_bytes
from experiments.paging.sweep import PAGED
from pagedopt.system.host import numbers

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


def part(run: Run) -> dict[str, Any]:
    """Rows of (way, share): bytes taken on both sides, beside budget, ring and what had to go to the host."""
    rows: list[dict[str, Any]] = []
    params = run.parameters()
    for name, options in PAGED.items():
        with run.attempt(f"{name}, to load its kernels"):
            _steps(run, params, options, 0)  # what the first step ever loads is not the state's
        for share in SHARES:
            with run.attempt(f"{name}, {share:.0%}"):
                rows.append({"way": name, "share": share, **_steps(run, params, options, share)})
                extra, allowed = rows[-1]["device_extra"], rows[-1]["allowed"]
                run.say(f"{name}, {share:.0%} on the device: {extra:,} bytes taken, {allowed:,} allowed")
    return {"rows": rows, "state_bytes": run.state_bytes}


def _steps(run: Run, params: list[torch.nn.Parameter], options: dict[str, Any], share: float) -> dict[str, Any]:
    """The least that was free while an optimizer was made and took steps, against what was free before."""
    run.free()
    torch.cuda.reset_peak_memory_stats(run.device)
    budget = int(share * run.state_bytes)
    before, host_before = torch.cuda.mem_get_info(run.device)[0], host_available()
    cached = torch.cuda.memory_reserved(run.device)
    with Lowest(lambda: torch.cuda.mem_get_info(run.device)[0]) as device, Lowest(host_available) as host:
        optimizer = adamw(params, device_budget=budget, **options)
        for _ in range(STEPS):
            optimizer.step()
        torch.cuda.synchronize()
    report = optimizer.memory_report()
    return {
        "budget": budget, "ring": report.ring, "allowed": budget + report.ring,
        "device_extra": before - device.value, "host_extra": host_before - host.value,
        "torch_extra": torch.cuda.max_memory_reserved(run.device) - cached, "away": away_bytes(report),
        "looks": device.looks, "by_place": dict(report.by_place), "measured": dict(report.measured),
    }  # fmt: skip
