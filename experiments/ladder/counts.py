"""How many kernels does a step of N tensors launch on each rung, and is it what the code says?

Answer (H200, 2026-11): AdamW over 1,000 tensors is 8,000 kernels in a loop, 115 as foreach, 38 as fused (the same in
one launch of a graph) and one over a pointer list; every count is what the code says.

N tensors of (2, 3); an addition, SGD with and without momentum, AdamW.  Kernels and launches are counted in traces on a
GPU, operators where torch dispatches them.  Beside them stands what the code must launch: M kernels a tensor in the
loop, and in foreach and fused torch's batching, simulated with the constants of the header that is installed.  A line
through the counts, a + b N, says what a further tensor costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from experiments.harness.machine import chosen_device
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Grid, Table, Text, number
from experiments.works.batching import Limits, installed
from experiments.works.contenders import COMPILED, FOREACH, FUSED, GRAPH, LIMIT, LOOP
from experiments.works.dispatch import dispatched
from experiments.works.fresh import Caches, fresh
from experiments.works.models import Work
from experiments.works.reference import Step
from experiments.works.rungs import DEFAULT, LIST, OPERATIONS, STRUCT, Operation
from experiments.works.trace import Incomplete, counted

COUNTS, TOYS = (1, 10, 36, 37, 48, 110, 111, 300, 1000), (1, 10, 37)
#: Lists that are compiled: longer ones take minutes (the question of compiled_optimizer).
COMPILED_COUNTS, COMPILED_ON_CPU = (1, 10, 36, 110), (1, 4, 8)
#: What a GPU is needed for.
ON_GPU = (GRAPH, STRUCT)
SIZE = 6


def measure(run: Run) -> Iterator[Row]:
    """A row per operation, rung and N: operators, kernels, launches, and how many there ought to be."""
    limits = installed()
    run.say(f"batching as in {limits.source}")
    for operation in run.each(OPERATIONS):
        for count in run.size(COUNTS, TOYS):
            for rung, build in operation.builds.items():
                if rung == COMPILED or (rung in ON_GPU and run.device.type == "cpu"):
                    continue
                try:
                    step = build(tensors(count, run.device)).step
                    yield row(operation, rung, count, run.device, limits, step)
                except Exception as error:  # the other rungs go on
                    run.leave_out(f"{operation.name}, {rung}, {count} tensors: {error}")
        yield from _compiled(run, operation)
    if run.device.type == "cpu":
        run.left_out.append("kernels and launches, CUDA graphs, tables by value: need a GPU")


def tensors(count: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Parameters of (2, 3) with gradients."""
    return Work("counted", [(2, 3)] * count, torch.float32, 28, 0).parameters(device)


def row(operation: Operation, rung: str, count: int, device: torch.device, limits: Limits, step: Step) -> Row:
    """What one step launches, once it has run a few times."""
    for _ in range(3):
        step()
    found: Row = {"what": "count", "operation": operation.name, "rung": rung, "count": count, "device": device.type}
    found |= {"operators": None, "kernels": None, "launches": None, "ended": None}
    if rung != COMPILED:  # what listens to the dispatcher keeps a compiler out
        found["operators"] = dispatched(step).operators
    if device.type == "cpu":
        return {**found, "expected": operation.operators(rung, count)}
    try:
        counts = counted(step)
    except Incomplete as error:
        return {**found, "expected": None, "ended": str(error)}
    expected = operation.expected(rung, [SIZE] * count, limits)
    return {**found, "kernels": counts.kernels, "launches": counts.launches, "expected": expected}


def _compiled(run: Run, operation: Operation) -> Iterator[Row]:
    """Rows of a process of its own, and of what it did not reach in its time."""
    if run.quick:
        run.left_out.append(f"{operation.name}, {COMPILED}: takes a compiler and tens of seconds")
        return
    counts = COMPILED_ON_CPU if run.device.type == "cpu" else COMPILED_COUNTS
    with Caches() as caches:
        found = fresh(compiled_counts, str(run.device), operation.name, counts, limit=LIMIT, caches=caches)
    yield from found.rows
    about = {"what": "count", "operation": operation.name, "rung": COMPILED, "device": run.device.type}
    for count in counts[len(found.rows) :]:
        yield {**about, "count": count, "operators": None, "kernels": None, "launches": None, "expected": None,
               "ended": found.ended}  # fmt: skip


def compiled_counts(device: str, operation: str, counts: Sequence[int]) -> Iterator[Row]:
    """In a process of its own: rows of the compiled rung, with the kernels that Inductor wrote for each."""
    from torch._inductor import metrics

    (asked,) = (one for one in OPERATIONS if one.name == operation)
    where = chosen_device(device)
    for count in counts:
        torch._dynamo.reset()  # each list is a graph of its own, and eight of one function are the most
        metrics.reset()
        step = asked.builds[COMPILED](tensors(count, where)).step
        found = row(asked, COMPILED, count, where, installed(), step)
        generated = getattr(metrics, "generated_kernel_count", None)
        if where.type == "cpu":
            found["kernels"] = generated
        yield {**found, "expected": None, "generated": generated}


def derive(rows: Rows) -> Rows:
    """How far each count is from what it ought to be, and a line through the counts of each rung."""
    found = Rows()
    for counts in rows.groups("operation", "rung"):
        for one in counts:
            seen, due = _seen(one), one["expected"]
            found.append({**one, "off": None if seen is None or due is None else abs(seen - due)})
        known = [(one["count"], seen) for one in counts if (seen := _seen(one)) is not None]
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


def _seen(row: Row) -> int | None:
    """Kernels on a GPU; on a CPU operators, or the kernels that Inductor wrote, those of the first step among them."""
    found: int | None = row["kernels"] if row["device"] != "cpu" or row["rung"] == COMPILED else row["operators"]
    return found


def shown(row: Row) -> str:
    """Kernels (launches, if they are not as many); on a CPU operators; what ought to be where it is not."""
    seen = _seen(row)
    if seen is None:
        return (row["ended"] or "-").strip().splitlines()[-1][:80]
    text = f"{seen:,}"
    if row["launches"] not in (None, seen):
        text += f" in {row['launches']:,}"
    return text if row["off"] in (None, 0) else f"{text} (not {row['expected']:,})"


def off(*rungs: str) -> Callable[[Rows], float | None]:
    """The largest deviation of some rungs, whatever the device and the operation."""

    def worst(rows: Rows) -> float | None:
        known = [one["off"] for one in rows if one.get("off") is not None and one["rung"] in rungs]
        return max(known, default=None)

    return worst


def of_ours(rows: Rows) -> float | None:
    """The most launches of ours."""
    return max((one["launches"] for one in rows if one["rung"] == LIST and one.get("launches")), default=None)


def default(rows: Rows) -> str | None:
    """Which rung torch takes by itself."""
    same = []
    for rung in (LOOP, FOREACH, FUSED):
        pairs = [
            (_seen(one), _seen(other))
            for one in rows.where(what="count", rung=DEFAULT, operation="AdamW")
            if (other := rows.first(what="count", rung=rung, operation="AdamW", count=one["count"]))
        ]
        if pairs and all(mine == its for mine, its in pairs):
            same.append(rung)
    device = rows[0]["device"]
    return (
        f"Left to itself, `torch.optim.AdamW(params)` on {device} does as {' and '.join(same)} does." if same else None
    )


def slope(row: Row) -> str:
    """What a further tensor costs."""
    return number(row["b"])


TABLES: list[Grid | Table] = [
    *(
        Grid(
            f"{operation.name}: kernels of a step over N tensors of (2, 3); on a CPU operators", down="rung",
            across="count", cell=shown, corner="N", where={"what": "count", "operation": operation.name},
        )
        for operation in OPERATIONS
    ),
    Table("a + b N through the counts of {operation}", by=("operation",), where={"what": "line"},
          columns={"rung": "rung", "a": "a", "b": slope, "farthest from it": "farthest"}),
]  # fmt: skip
BARS = [
    Bar("the loop launches M x N, off by", off(LOOP), at_most=0),
    Bar("foreach and fused launch what the header says, off by", off(FOREACH, FUSED), at_most=0),
    Bar("ours in structs of 4 KB launches what its table says, off by", off(STRUCT), at_most=0),
    Bar("launches of ours, at any N", of_ours, at_most=1),
]
TEXTS = [Text("counts", default)]
