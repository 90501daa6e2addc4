"""How many bytes cross the link in a step, and how many had to?

Answer (H200, 2026-11): 1.0004 to 1.0014 times as many, in every way at every share; with nothing away one megabyte
goes up.

Counted by the card (:mod:`experiments.works.counters`): known traffic of the same kind first, copies both ways for the
staged way and the plain kernel for those in place; for the staged way torch's profiler is a second witness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.harness.columns import formatted, gb
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table
from experiments.works.counters import LinkCounters, Traffic, fits
from experiments.works.link import BOTH, IN_PLACE, MOVES, Link
from experiments.works.paged import PAGED, Problem, adamw, away_bytes, way_and_share
from experiments.works.trace import chrome_events

NEEDS_GPU = True
#: Shares of state on the device.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Kinds of rows: counts of nothing and of known traffic, of steps, and the profiler's copies.
IDLE, KNOWN, STEP, PROFILER = "idle", "known", "step", "profiler"


def measure(run: Run) -> Iterator[Row]:
    """Bytes counted for known traffic, then by way and share, beside those that had to cross."""
    problem, counters = Problem(run), LinkCounters(run.device)
    idle = counters.count(lambda: None)
    yield {"kind": IDLE, "counted_up": idle.up, "counted_down": idle.down}
    known: dict[str, Traffic] = {}
    for row in _known(run, counters, idle):
        counted, moved = (Traffic(row[f"{name}_up"], row[f"{name}_down"]) for name in ("counted", "moved"))
        run.say(f"{row['what']}: counted {counted.up:,.0f} up, {counted.down:,.0f} down")
        if row["what"] in (BOTH, IN_PLACE):
            known[row["what"]] = counted / moved
        yield row
    run.free()
    for name, options in run.each(PAGED.items()):
        with run.attempt(name):
            per_byte = known[BOTH if options["host_access"] == "staged" else IN_PLACE]
            yield from _ways(problem, name, per_byte, counters, idle)
    with run.attempt("torch.profiler as a second witness"):
        for name, nbytes in copied(_profiled(problem)).items():
            yield {"kind": PROFILER, "what": name, "bytes": nbytes}


def _known(run: Run, counters: LinkCounters, idle: Traffic) -> Iterator[Row]:
    """What is moved, and what is counted for it, in traffic whose bytes are known."""
    link = Link(run)
    blocks, _ = link.best_blocks(run)
    for case in link.cases(blocks):
        case.run()
        counted = counters.count(case.run) - idle
        up, down = (copies * link.nbytes for copies in MOVES[case.name])
        moved = {"moved_up": up, "moved_down": down}
        yield {"kind": KNOWN, "what": case.name, **moved, "counted_up": counted.up, "counted_down": counted.down}


def _ways(problem: Problem, name: str, per_byte: Traffic, counters: LinkCounters, idle: Traffic) -> Iterator[Row]:
    """One way at every share."""
    run = problem.run
    optimizer = adamw(problem.parameters(), device_budget=0, **PAGED[name])
    optimizer.step()
    for share in SHARES:
        optimizer.set_device_budget(int(share * problem.state_bytes))
        optimizer.step()
        must = away_bytes(optimizer.memory_report())
        if not fits(Traffic(must, must)):
            run.leave_out(f"{name}: {must:,} bytes could wrap the counters twice")
            continue
        found = (counters.count(optimizer.step) - idle) / per_byte
        row = {"kind": STEP, "way": name, "share": share, "must": must, "up": found.up, "down": found.down}
        run.say(f"{way_and_share(row)}: {found.up:,.0f} up, {found.down:,.0f} down of {must:,}")
        yield row


def _profiled(problem: Problem) -> list[dict[str, Any]]:
    """The profiler's events of one staged step with all state on the host."""
    optimizer = adamw(problem.parameters(), placement="mapped", host_access="staged", device_budget=0)
    optimizer.step()
    torch.cuda.synchronize()
    for _ in range(2):  # the first one wakes the profiler up
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            optimizer.step()
            torch.cuda.synchronize()
    return chrome_events(profiler)


def copied(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Bytes of the copies in a Chrome trace, by their name.

    >>> copied([{"cat": "gpu_memcpy", "name": "HtoD", "args": {"bytes": 3}}, {"cat": "kernel"}])
    Counter({'HtoD': 3})
    """
    found: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            found[event["name"]] += int(event["args"]["bytes"])
    return found


def derive(rows: Rows) -> Rows:
    """Bytes that crossed over those that had to, both directions together; nothing where none had to."""
    found = Rows(rows)
    for i, row in enumerate(rows):
        if row["kind"] == STEP and row["must"]:
            found[i] = {**row, "ratio": (row["up"] + row["down"]) / (2 * row["must"])}
    return found


TABLES = [
    Table(
        "bytes over the link in a step, counted by the card",
        {
            "way": way_and_share,
            "GB each way that had to": gb("must"),
            "up": gb("up"),
            "down": gb("down"),
            "÷ had to": formatted("ratio", "{:.4f}"),
        },
        where={"kind": STEP},
    ),
    Table(
        "what the counters count for known traffic",
        {
            "known traffic": "what",
            "GB up": gb("moved_up"),
            "GB down": gb("moved_down"),
            "counted received": gb("counted_up"),
            "counted sent": gb("counted_down"),
        },
        where={"kind": KNOWN},
    ),
    Table(
        "copies of one staged step, all away, as torch's profiler has them",
        {"copy": "what", "GB": gb("bytes")},
        where={"kind": PROFILER},
    ),
]
CROSSED = "bytes that crossed ÷ bytes that had to, worst share"
BARS = [Bar(f"{way}: {CROSSED}", "ratio", at_most=1.01, unit="x", kind=STEP, way=way) for way in PAGED]
