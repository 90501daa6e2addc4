"""Part ``bytes``: how many bytes cross the link in a step, and how many had to.

Counted by the card (:mod:`experiments.paging.counters`); for the staged way torch's profiler is a second witness.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.paging.counters import Calibration, LinkCounters, Traffic, fits
from experiments.paging.link import BOTH, DOWN, IN_PLACE, UP, Link, size
from experiments.paging.problem import Run, adamw, away_bytes
from experiments.paging.sweep import PAGED

#: Shares of state on the device.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
STAGED, PLAIN = "copies both ways", "plain kernel in place"
Rows = list[dict[str, Any]]


def part(run: Run) -> dict[str, Any]:
    """Bytes counted and bytes that had to cross, by way and share."""
    counters = LinkCounters(run.device)
    idle = counters.count(lambda: None)
    known = _known(run, counters, idle)
    calibrations = {
        STAGED: Calibration.of(Traffic(**known[BOTH]["counted"]), Traffic(**known[BOTH]["moved"])),
        PLAIN: Calibration.of(Traffic(**known[IN_PLACE]["counted"]), Traffic(**known[IN_PLACE]["moved"])),
    }
    run.free()
    rows: Rows = []
    for name, options in PAGED.items():
        with run.attempt(name):
            kind = STAGED if options["host_access"] == "staged" else PLAIN
            rows += _ways(run, name, calibrations[kind], counters, idle)
    witness: dict[str, int] = {}
    with run.attempt("torch.profiler as a second witness"):
        witness = _profiled(run)
    return {
        "idle": vars(idle), "known": known, "raw_per_byte": {k: vars(c.raw) for k, c in calibrations.items()},
        "rows": rows, "profiler": witness, "state_bytes": run.state_bytes,
    }  # fmt: skip


def _known(run: Run, counters: LinkCounters, idle: Traffic) -> dict[str, dict[str, dict[str, float]]]:
    """What is counted for traffic whose bytes are known."""
    link = Link(run.device, size(run))
    blocks, _ = link.best_blocks(run)
    n = link.nbytes
    cases: dict[str, tuple[Callable[[], None], Traffic]] = {
        UP: (link.up, Traffic(n, 0)),
        DOWN: (link.down, Traffic(0, n)),
        BOTH: (link.both, Traffic(n, n)),
        IN_PLACE: (functools.partial(link.in_place, blocks), Traffic(2 * n, 2 * n)),
    }
    found = {}
    for name, (action, moved) in cases.items():
        action()
        counted = counters.count(action) - idle
        found[name] = {"moved": vars(moved), "counted": vars(counted)}
        run.say(f"{name}: counted {counted.up / n:.4f} up, {counted.down / n:.4f} down per byte of one copy")
    return found


def _ways(run: Run, name: str, calibration: Calibration, counters: LinkCounters, idle: Traffic) -> Rows:
    """One way at every share."""
    params = run.parameters()
    optimizer = adamw(params, device_budget=0, **PAGED[name])
    optimizer.step()
    rows = []
    for share in SHARES:
        optimizer.set_device_budget(int(share * run.state_bytes))
        optimizer.step()
        must = away_bytes(optimizer.memory_report())
        if not fits(Traffic(must, must)):
            run.left_out.append(f"{name}: {must:,} bytes could wrap the counters twice")
            continue
        found = calibration.moved(counters.count(optimizer.step) - idle)
        rows.append({
            "way": name, "share": share, "must": must, "up": found.up, "down": found.down,
            "ratio": found.sum / (2 * must) if must else None,
        })  # fmt: skip
        run.say(f"{name}, {share:.0%} on the device: {found.up:,.0f} up, {found.down:,.0f} down of {must:,}")
    return rows


def _profiled(run: Run) -> dict[str, int]:
    """Bytes by kind of copy, in one staged step with all state on the host, as CUPTI has them."""
    params = run.parameters()
    optimizer = adamw(params, placement="mapped", host_access="staged", device_budget=0)
    optimizer.step()
    torch.cuda.synchronize()
    for _ in range(2):  # the first one wakes the profiler up
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return copied(json.loads(path.read_text()))


def copied(trace: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the copies in a Chrome trace, by their name.

    >>> copied({"traceEvents": [{"cat": "gpu_memcpy", "name": "HtoD", "args": {"bytes": 3}}, {"cat": "kernel"}]})
    {'HtoD': 3}
    """
    found: dict[str, int] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            found[event["name"]] = found.get(event["name"], 0) + int(event["args"]["bytes"])
    return found
