"""How many kernels does a step of N tensors launch on each rung, and is it what the code says?

Answer (H200, 2026-11): AdamW over 1,000 tensors is 8,000 kernels in a loop, 115 as foreach, 38 as fused (the same in
one launch of a graph) and one over a pointer list; every count is what the code says.

N tensors of (2, 3); an addition, SGD with and without momentum, AdamW.  Kernels and launches are counted in traces on a
GPU, operators where torch dispatches them.  Beside them stands what the code must launch: M kernels a tensor in the
loop, and in foreach and fused torch's batching, simulated with the constants of the header that is installed.  A line
through the counts, a + b N, says what a further tensor costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from experiments.kept import chosen_device
from experiments.lab import Page, Row, Rows, Run, last_line
from experiments.works.batching import installed
from experiments.works.contenders import COMPILED, FOREACH, FUSED, GRAPH, LIMIT, LOOP
from experiments.works.dispatch import dispatched
from experiments.works.fresh import fresh
from experiments.works.models import Work
from experiments.works.rungs import DEFAULT, LIST, OPERATIONS, STRUCT, Operation
from experiments.works.trace import Incomplete, counted

MEASURES = ("launch", "tables", "transports", "optim")
COUNTS, TOYS = (1, 10, 36, 37, 48, 110, 111, 300, 1000), (1, 10, 37)
#: Lists that are compiled: longer ones take minutes (the question of compiled_optimizer).
COMPILED_COUNTS, COMPILED_ON_CPU = (1, 10, 36, 110), (1, 4, 8)
#: What a GPU is needed for.
ON_GPU = (GRAPH, STRUCT)


def measure(run: Run) -> Iterator[Row]:
    """A row per operation, rung and N: operators, kernels, launches, and how many there ought to be."""
    run.say(f"batching as in {installed().source}")
    cpu = run.device.type == "cpu"
    for operation in run.each(OPERATIONS):
        for rung in operation.builds:
            if rung != COMPILED and not (cpu and rung in ON_GPU):
                with run.attempt(f"{operation.name}, {rung}", (Exception,)):
                    for count in run.size(COUNTS, TOYS):
                        yield row(operation, rung, count, run.device)
        if run.quick:
            run.left_out.append(f"{operation.name}, {COMPILED}: takes a compiler and tens of seconds")
            continue
        counts = COMPILED_ON_CPU if cpu else COMPILED_COUNTS
        found = fresh(compiled_counts, str(run.device), operation.name, counts, limit=LIMIT)
        yield from found.rows
        for count in counts[len(found.rows) :]:  # what it did not reach in its time
            yield {**blank(operation, COMPILED, count, run.device), "ended": found.ended}
    if cpu:
        run.left_out.append("kernels and launches, CUDA graphs, tables by value: need a GPU")


def blank(operation: Operation, rung: str, count: int, device: torch.device) -> Row:
    """A row of which nothing is known."""
    about = {"what": "count", "operation": operation.name, "rung": rung, "count": count, "device": device.type}
    return about | dict.fromkeys(("operators", "kernels", "launches", "expected", "ended"))


def row(operation: Operation, rung: str, count: int, device: torch.device) -> Row:
    """What a step over so many tensors of (2, 3) launches, once it has run a few times."""
    shapes = [(2, 3)] * count
    step = operation.builds[rung](Work("counted", shapes).parameters(device)).step
    for _ in range(3):
        step()
    found = blank(operation, rung, count, device)
    if rung != COMPILED:  # what listens to the dispatcher keeps a compiler out
        found["operators"] = dispatched(step).total()
    if device.type == "cpu":
        return {**found, "expected": operation.operators(rung, count)}
    try:
        counts = counted(step)
    except Incomplete as error:
        return {**found, "ended": str(error)}
    expected = operation.expected(rung, [2 * 3] * count, installed())
    return {**found, "kernels": counts.kernels, "launches": counts.launches, "expected": expected}


def compiled_counts(device: str, operation: str, counts: Sequence[int]) -> Iterator[Row]:
    """In a process of its own: rows of the compiled rung, with the kernels that Inductor wrote for each."""
    from torch._inductor import metrics

    (asked,) = (one for one in OPERATIONS if one.name == operation)
    where = chosen_device(device)
    for count in counts:
        torch._dynamo.reset()  # each list is a graph of its own, and eight of one function are the most
        metrics.reset()
        found = row(asked, COMPILED, count, where)
        generated = getattr(metrics, "generated_kernel_count", None)
        kernels = generated if where.type == "cpu" else found["kernels"]
        yield {**found, "kernels": kernels, "expected": None, "generated": generated}


def derive(rows: Rows) -> Rows:
    """What is held to what ought to be, how far it is from that, and a line through the counts of each rung.

    Seen are kernels on a GPU; on a CPU operators, or the kernels that Inductor wrote, those of the first step among
    them.
    """
    found = Rows()
    for counts in rows.groups("operation", "rung"):
        column = "operators" if counts[0]["device"] == "cpu" and counts[0]["rung"] != COMPILED else "kernels"
        for one in counts:
            seen, due = one[column], one["expected"]
            off = None if seen is None or due is None else abs(seen - due)
            batched = off if one["rung"] in (FOREACH, FUSED) else None
            found.append({**one, "seen": seen, "off": off, "off_batched": batched})
        known = [(one["count"], one[column]) for one in counts if one[column] is not None]
        if len(known) > 2:
            about = {name: counts[0][name] for name in ("operation", "rung", "device")}
            found.append({**about, "what": "line", **line(known)})
    return found


def line(points: Sequence[tuple[int, int]]) -> dict[str, float]:
    """a + b N through (N, count), and how far the farthest point is from it."""
    across, up = np.array(points, float).T
    b, a = np.polyfit(across, up, 1)
    farthest = abs(up - a - b * across).max()
    return {"a": round(float(a), 6) + 0.0, "b": round(float(b), 6) + 0.0, "farthest": round(float(farthest), 6)}


def shown(row: Row) -> str:
    """Kernels (launches, if they are not as many); on a CPU operators; what ought to be where it is not."""
    seen = row["seen"]
    if seen is None:
        return last_line()(row) or "-"
    launched = f"{seen:,}" if row["launches"] in (None, seen) else f"{seen:,} in {row['launches']:,}"
    return f"{launched} (not {row['expected']:,})" if row["off"] else launched


def default(rows: Rows) -> str | None:
    """Which rung torch takes by itself."""
    steps = rows.where(what="count", operation="AdamW")
    seen = {rung: [(one["count"], one["seen"]) for one in steps.where(rung=rung)] for rung in (LOOP, FOREACH, FUSED)}
    mine = [(one["count"], one["seen"]) for one in steps.where(rung=DEFAULT)]
    same = " and ".join(rung for rung, its in seen.items() if mine and its == mine)
    return f"Left to itself, `torch.optim.AdamW(params)` on {rows[0]['device']} does as {same} does." if same else None


TITLE = "{operation}: kernels of a step over N tensors of (2, 3); on a CPU operators"
GRID: dict[str, Any] = {"down": "rung", "across": "count", "cell": shown, "corner": "N"}
#: SGD's table is that of the addition, and with momentum it lies between this and AdamW's.


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, and what is held to a limit."""
    page.grid(TITLE, rows.where(what="count", operation="AdamW"), **GRID)
    page.detail.grid(TITLE, rows.where(what="count", operation="add"), **GRID)
    page.say(default(rows))
    page.bar("the loop launches M x N, off by", rows.where(rung=LOOP), "off", at_most=0)
    page.bar("foreach and fused launch what the header says, off by", rows, "off_batched", at_most=0)
    page.bar("ours in structs of 4 KB launches what its table says, off by", rows.where(rung=STRUCT), "off", at_most=0)
    page.bar("launches of ours, at any N", rows.where(rung=LIST), "launches", at_most=1)
