"""How many bytes cross the link in a step, and how many had to?

Answer (H200, 2026-11): 1.0004 to 1.0014 times as many, in every way at every share; with nothing away one megabyte
goes up.

Counted by the card (:mod:`experiments.works.counters`): known traffic of the same kind first, copies both ways for the
staged way and the plain kernel for those in place; for the staged way torch's profiler is a second witness.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.harness.columns import gb
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table
from experiments.works.counters import LinkCounters, Traffic, fits
from experiments.works.link import BOTH, DOWN, IN_PLACE, UP, Link
from experiments.works.paged import PAGED, Problem, adamw, away_bytes

NEEDS_GPU = True
#: Shares of state on the device.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Kinds of rows: counts of nothing and of known traffic, of steps, and the profiler's copies.
IDLE, KNOWN, STEP, PROFILER = "idle", "known", "step", "profiler"


def measure(run: Run) -> Iterator[Row]:
    """Bytes counted for known traffic, then by way and share, beside those that had to cross."""
    problem, counters = Problem(run), LinkCounters(run.device)
    idle = counters.count(lambda: None)
    yield {"kind": IDLE, **cells(counted=idle)}
    known = _known(run, counters, idle)
    for name, (moved, counted) in known.items():
        yield {"kind": KNOWN, "what": name, **cells(moved=moved, counted=counted)}
    run.free()
    for name, options in run.each(PAGED.items()):
        with run.attempt(name):
            moved, counted = known[BOTH if options["host_access"] == "staged" else IN_PLACE]
            yield from _ways(problem, name, counted / moved, counters, idle)
    with run.attempt("torch.profiler as a second witness"):
        for name, nbytes in _profiled(problem).items():
            yield {"kind": PROFILER, "what": name, "bytes": nbytes}


def cells(**traffic: Traffic) -> Row:
    """Two columns for each: up and down."""
    return {f"{name}_{way}": nbytes for name, found in traffic.items() for way, nbytes in vars(found).items()}


def _known(run: Run, counters: LinkCounters, idle: Traffic) -> dict[str, tuple[Traffic, Traffic]]:
    """What is moved, and what is counted for it, in traffic whose bytes are known."""
    link = Link(run)
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
        found[name] = moved, counted
        run.say(f"{name}: counted {counted.up / n:.4f} up, {counted.down / n:.4f} down per byte of one copy")
    return found


def _ways(problem: Problem, name: str, per_byte: Traffic, counters: LinkCounters, idle: Traffic) -> list[Row]:
    """One way at every share."""
    run, params = problem.run, problem.parameters()
    optimizer = adamw(params, device_budget=0, **PAGED[name])
    optimizer.step()
    rows = []
    for share in SHARES:
        optimizer.set_device_budget(int(share * problem.state_bytes))
        optimizer.step()
        must = away_bytes(optimizer.memory_report())
        if not fits(Traffic(must, must)):
            run.leave_out(f"{name}: {must:,} bytes could wrap the counters twice")
            continue
        found = (counters.count(optimizer.step) - idle) / per_byte
        rows.append({"kind": STEP, "way": name, "share": share, "must": must, "up": found.up, "down": found.down})
        run.say(f"{name}, {share:.0%} on the device: {found.up:,.0f} up, {found.down:,.0f} down of {must:,}")
    return rows


def _profiled(problem: Problem) -> dict[str, int]:
    """Bytes by kind of copy, in one staged step with all state on the host, as CUPTI has them."""
    params = problem.parameters()
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


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    rows: list[Row] = [{"kind": IDLE, **cells(counted=Traffic(**part["idle"]))}]
    rows += [{"kind": KNOWN, "what": what, **cells(**{name: Traffic(**traffic) for name, traffic in found.items()})}
             for what, found in part["known"].items()]  # fmt: skip
    rows += [{"kind": STEP, **{name: row[name] for name in ("way", "share", "must", "up", "down")}}
             for row in part["rows"]]  # fmt: skip
    return rows + [{"kind": PROFILER, "what": name, "bytes": nbytes} for name, nbytes in part["profiler"].items()]


def derive(rows: Rows) -> Rows:
    """Bytes that crossed over those that had to, both directions together; nothing where none had to."""
    return Rows(
        {**row, "ratio": (row["up"] + row["down"]) / (2 * row["must"]) if row["must"] else None}
        if row["kind"] == STEP else row for row in rows
    )  # fmt: skip


TABLES = [
    Table("bytes over the link in a step, counted by the card", where={"kind": STEP}, columns={
        "way": lambda row: f"{row['way']}, {row['share']:.0%} on the device", "GB each way that had to": gb("must"),
        "up": gb("up"), "down": gb("down"),
        "÷ had to": lambda row: "-" if row["ratio"] is None else f"{row['ratio']:.4f}",
    }),
    Table("what the counters count for known traffic", where={"kind": KNOWN}, columns={
        "known traffic": "what", "GB up": gb("moved_up"), "GB down": gb("moved_down"),
        "counted received": gb("counted_up"), "counted sent": gb("counted_down"),
    }),
    Table("copies of one staged step, all away, as torch's profiler has them", where={"kind": PROFILER},
          columns={"copy": "what", "GB": gb("bytes")}),
]  # fmt: skip
BARS = [
    Bar(f"{way}: bytes that crossed ÷ bytes that had to, worst share", "ratio", at_most=1.01, unit="x",
        kind=STEP, way=way)
    for way in PAGED
]  # fmt: skip
