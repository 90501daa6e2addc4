"""How long is the first step of a compiled optimizer by the number of tensors, and after how many steps has it paid?

Answer: see notes/compiled_optimizer.md.

AdamW over N tensors of 64 x 64, each step the first of a process of its own.  *Cold*: compilers' caches are empty;
*warm*: they are as the cold process left them; *portable*: they are empty, and what ``save_cache_artifacts`` gave is
loaded; *tensor by tensor*: one compiled update called N times, as torchao does it.  From the call until the device is
idle; what constructing the first optimizer of a process loads (Dynamo) is not in it.  Lists of more than 110 tensors
are compiled once, and 300 not again: a first reading on an H200 was 20 s at 100 and more than 200 s at 300.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.compiled.pictures import crossing, stacked
from experiments.lab import Bar, Column, Plot, Row, Rows, Run, Table, Text, error, formatted, last_line, mib
from experiments.works.first_steps import (
    COLD,
    EACH,
    FOREACH,
    FUSED,
    OURS_COLD,
    OURS_WARM,
    PORTABLE,
    TRACED,
    WHOLE,
    first_step,
)
from experiments.works.fresh import empty_caches, fresh
from experiments.works.phases import PHASES

#: Processes that one after the other use the same caches, and the numbers of tensors of each.
Plan = Sequence[tuple[tuple[str, ...], Sequence[int]]]
ON_GPU: Plan = (
    (WHOLE, (1, 10, 36, 110, 148)),
    ((EACH,), (10, 148)),
    ((OURS_COLD, OURS_WARM), (1, 10, 110, 148, 1000)),
    ((FOREACH,), (10, 148)),
    ((FUSED,), (10, 148)),
)
ON_CPU: Plan = (
    (WHOLE, (1, 4, 8)),
    ((TRACED,), (1, 10, 40, 110)),
    ((EACH,), (8,)),
    ((OURS_COLD, OURS_WARM), (1, 8, 1000)),
    ((FOREACH,), (8,)),
    ((FUSED,), (8,)),
)
TOYS: Plan = (((TRACED,), (2,)), ((OURS_COLD,), (2,)))
#: Seconds after which a process is given up.
LIMIT = 150
#: Who is overtaken.
RIVALS = {"foreach": FOREACH, "fused": FUSED}


def measure(run: Run) -> Iterator[Row]:
    """A row per way and N: the first step, its phases (s), later steps (µs), kernels, graphs."""
    plan = run.size(ON_CPU if run.device.type == "cpu" else ON_GPU, TOYS)
    for ways, count in run.each([(ways, count) for ways, counts in plan for count in counts]):
        with empty_caches() as caches, tempfile.TemporaryDirectory() as folder:
            for way in ways:
                about = {"way": way, "count": count, "device": run.device.type, "clock": "wall"}
                arguments = (str(run.device), way, count, f"{folder}/artifacts")
                if run.quick:  # a process takes seconds to begin
                    yield {**about, **next(first_step(*arguments)), "ended": None}
                    continue
                found = fresh(first_step, *arguments, limit=LIMIT, caches=None if way == PORTABLE else caches)
                yield {**about, **found.as_dict()}
                if found.ended:
                    run.leave_out(f"{count} tensors, {way}: {found.ended}; nor what would use its caches")
                    break
    if run.device.type == "cpu":
        run.left_out.append("compiled lists of more than 8 tensors: take a GPU, or g++ for minutes")


def seconds(row: Row) -> float | None:
    """Until the first step is done."""
    return row["first"]["median"] if row.get("first") else None


def derive(rows: Rows) -> Rows:
    """What no phase explains, the step from which on foreach and fused have taken longer, and a power of N."""
    found = Rows()
    longest = max(
        (row["count"] for row in rows.where(way=FOREACH) if rows.first(way=COLD, count=row["count"])), default=0
    )
    for row in rows:
        first, phases = seconds(row), row.get("phases") if row["way"] in (*WHOLE, TRACED) else None
        off = abs(1 - sum(phases.values()) / first) if phases and first else None
        paid = {
            f"paid_{name}": paid_after(row, rows.first(way=way, count=row["count"])) for name, way in RIVALS.items()
        }
        drawn = {
            "whole": row["way"] in WHOLE,
            "phased": off is not None,
            "compared": row["count"] == longest and row.get("later") is not None,
        }
        found.append({**row, "what": "step", "first_s": first, "off": off, **drawn, **paid})
    for way in (*WHOLE, TRACED):
        known = [(row["count"], taken) for row in rows.where(way=way) if (taken := seconds(row))]
        if len(known) > 2:
            found.append({"what": "power", "way": way, "clock": "wall", **power(known)})
    return found


def paid_after(row: Row, rival: Row | None) -> int | None:
    """The first step by which a rival has taken longer in all, first steps included; None: it never does."""
    if rival is None or not row.get("later") or not rival.get("later") or row["way"] == rival["way"]:
        return None
    ahead = (seconds(row) or 0.0) - (seconds(rival) or 0.0)
    gain = (rival["later"]["median"] - row["later"]["median"]) / 1e6
    if ahead <= 0:
        return 1
    return 1 + math.ceil(ahead / gain) if gain > 0 else None


def power(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The exponent of N through all points, and between the last two."""
    across, up = np.log(np.array(points, float)).T
    last = (up[-1] - up[-2]) / (across[-1] - across[-2])
    return {"exponent": float(np.polyfit(across, up, 1)[0]), "last": float(last), "counts": [n for n, _ in points]}


def phase(name: str) -> Column:
    """A column of seconds of a phase."""
    return lambda row: row["phases"][name] if row.get("phases") else None


def unpaid(rows: Rows) -> float | None:
    """Lists over which foreach was timed, and of which nobody knows when a cold compiled step has paid."""
    known = [rows.first(what="step", way=COLD, count=row["count"]) for row in rows.where(what="step", way=FOREACH)]
    return sum(row is None or row["first_s"] is None for row in known) if known else None


def powers(rows: Rows) -> str | None:
    """The exponents."""
    said = [
        f"{row['way']}: N^{row['exponent']:.2f} over N = {', '.join(map(str, row['counts']))}, "
        f"N^{row['last']:.2f} between the last two"
        for row in rows.where(what="power")
    ]
    return "The first step grows as a power of N. " + "; ".join(said) + "." if said else None


TABLES = [
    Table("AdamW over N tensors of 64 x 64 on {device}: the first step of a process, {clock}", columns={
        "step": "way", "N": "count", "first, s": "first", "built before it, s": "built", "later, µs": "later",
        "kernels": "kernels", "graphs": "graphs", "paid against foreach, steps": "paid_foreach",
        "against fused": "paid_fused", "portable cache, MiB": mib("cache_bytes"), "error": error(), "": last_line(),
    }, where={"what": "step"}),
    Table("its phases, each moment in one of them (s, {clock})", columns={
        "step": "way", "N": "count", "first": "first", **{name: phase(name) for name in PHASES},
        "in none": formatted("off", "{:.1%}"),
    }, where={"what": "step", "phased": True}),
]  # fmt: skip
BARS = [
    Bar("ours, cold, one tensor", "first_s", at_most=0.5, unit="s", way=OURS_COLD, count=1, device="cuda"),
    Bar("ours, cold, 1,000 tensors", "first_s", at_most=2.0, unit="s", way=OURS_COLD, count=1000, device="cuda"),
    Bar("ours, warm", "first_s", at_most=0.3, unit="s", way=OURS_WARM, device="cuda"),
    Bar("compiled: of the first step, what no phase explains", "off", at_most=0.05, whole=True),
    Bar("compiled: lists whose break-even is not known", unpaid, at_most=0),
]
PLOTS = [Plot("first-step", stacked, where={"what": "step"}), Plot("break-even", crossing, where={"compared": True})]
TEXTS = [Text("first_call", powers)]
