"""What does an iteration of training take with state resident, on the host and exposed, and hidden under the forward?

The step of the hidden way is queued by ``attach()``.  An iteration is timed from its begin to that of the next one, on
the stream that computes, while the host runs ahead.

What the hidden way should take is estimated: forward + backward + clipping of the exposed way, and by how much the
update is late: as much as it is longer than the forward, or as much as one parameter's last page is updated, with the
step alone, later than the forward alone reaches the first module that owns the parameter, whichever is more.  It is
made of medians of other iterations, so it is no floor: a single iteration may take less.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from experiments.lab import Column, Page, Row, Rows, Run, formatted, ms, over, ratio, series, spread_ms
from experiments.pictures import BLUE, GRAY, ORANGE, Bars
from experiments.works.staged import staged
from experiments.works.training import Load, Make, Mark, Training
from pagedopt import PagedAdamW
from pagedopt.formats.floating import StateFormat
from pagedopt.planning.sizes import SIZES

NOTE = "hiding"
NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
FUSED, RESIDENT, EXPOSED, HIDDEN = "torch fused, resident", "resident", "on the host, exposed", "on the host, hidden"
CALLS, NEARLY = "on the host, exposed, call by call", "on the host but for 64 MiB, hidden"
MODELS = {"355 M": "gpt2-medium", "1.56 B": "gpt2-xl"}
#: About 0.2 s, in cycles.
AHEAD = 400_000_000
PARTS = ("forward", "backward", "clip")
#: (model, load, format of state, way)
Plan = tuple[str, Load, str, str]
PLAN: tuple[Plan, ...] = tuple(
    (model, Load(), state, way)
    for model in MODELS
    for state, ways in (
        ("float32", (FUSED, RESIDENT, CALLS, EXPOSED, HIDDEN)),
        ("bfloat16", (EXPOSED, HIDDEN)),
        ("int8", (CALLS, EXPOSED, HIDDEN, NEARLY)),
    )
    for way in ways
)


def measure(run: Run) -> Iterator[Row]:
    """A row per model, load, format of state and way."""
    yield from of_plan(run, PLAN)


def of_plan(run: Run, plan: tuple[Plan, ...]) -> Iterator[Row]:
    """A row for each of a plan."""
    plan = run.size(plan, plan[-3:])
    for model, load, state, way in run.each(plan):
        about = {"model": model, "load": str(load), "state": state, "way": way}
        with run.attempt(", ".join(about.values())):
            size = SIZES[run.size(MODELS[model], "tiny")]
            with staged("calls" if way == CALLS else "graph"):
                training = Training(run.device, size, load, maker(way, state))
            hides = way in (HIDDEN, NEARLY)
            if hides:
                training.optimizer.attach(training.model)
            yield {**about, **timed(run, training), **(of_overlap(training) if hides else {})}
            del training


def maker(way: str, state: str) -> Make:
    """What makes the optimizer of a way."""
    if way == FUSED:
        return partial(torch.optim.AdamW, fused=True)
    budget = {RESIDENT: None, NEARLY: "64MiB"}.get(way, 0)
    return partial(PagedAdamW, state_format=cast(StateFormat, state), device_budget=budget)


def timed(run: Run, training: Training) -> Row:
    """Times of iterations and of their parts (µs), and device memory at the peak (bytes)."""
    for _ in range(3):
        training.iterate()
    training.wait()
    training.host.clear()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    marks = [training.iterate() for _ in range(run.size(8, 2))]
    host = (time.perf_counter() - begin) * 1e6 / len(marks)
    marks.append([Mark(run.device)])
    training.wait()
    clock = "GPU" if run.device.type == "cuda" else "wall"
    whole = [after[0].since(before[0]) for before, after in itertools.pairwise(marks)][:-1]  # the last has no forward
    parts = zip(*([b.since(a) for a, b in itertools.pairwise(each)] for each in marks[:-1]), strict=True)
    return {
        "time": series(whole, clock),
        **{name: series(of, clock) for name, of in zip(PARTS, parts, strict=True)},
        "step_host": series(training.host, "host"),
        "host": series([host], "host"),
        "peak": torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0,
    }


def of_overlap(training: Training) -> Row:
    """Launches that were hidden and waited for, steps that were not queued, and by how much updates come too late."""
    report = training.optimizer.overlap_report()
    counts = {"pages_hidden": report.hidden, "pages_waited": report.waited, "plain": sum(report.plain.values())}
    if training.device.type != "cuda":
        return counts  # fences carry launches out there
    updated, reached = (least(partial(times, training)) for times in (updates, reads))
    late = max(0.0, *(updated[p] - reached[p] for p in updated))
    return {**counts, "late": series([late], "GPU"), "alone": series([max(updated.values())], "GPU")}


def least(times: Callable[[], dict[Tensor, float]]) -> dict[Tensor, float]:
    """The least of three times of each parameter."""
    first, *more = (times() for _ in range(3))
    return {p: min(at, *(found[p] for found in more)) for p, at in first.items()}


def updates(training: Training) -> dict[Tensor, float]:
    """When the last page of each parameter is updated (µs), with the step alone; call by call, to time its events."""
    overlap, optimizer = training.optimizer._overlap, training.optimizer
    before, graphs = overlap._events, optimizer.store.graphs
    wanted, graphs.wanted, optimizer._plan = graphs.wanted, False, None
    training.iterate()  # which makes the lists: in the next step the host is fast enough
    optimizer.wait()
    training.gradients()
    training.wait()
    count = 2 * sum(arena.layout.pages for arena in optimizer.store.arenas) + 2
    overlap._events = marks = [Mark(training.device) for _ in range(count)]
    begin = Mark(training.device)
    training.step()
    queued = overlap.queued
    optimizer.wait()
    training.wait()
    overlap._events, graphs.wanted, optimizer._plan = before, wanted, None
    return {p: marks[at].since(begin) for p in training.model.parameters() if (at := queued.launch_of(p)) >= 0}


def reads(training: Training) -> dict[Tensor, float]:
    """When a module that owns the parameter is called first (µs), with the forward alone; 0 if none is called."""
    marks: dict[torch.nn.Module, Mark] = {}
    handles = [
        module.register_forward_pre_hook(lambda module, _: marks.setdefault(module, Mark(training.device)) and None)
        for module in training.model.modules()
    ]
    torch.cuda._sleep(AHEAD)  # in training, too, the host is ahead of the GPU
    begin = Mark(training.device)
    training.forward()
    training.wait()
    for handle in handles:
        handle.remove()
    found: dict[Tensor, float] = {}
    for module in training.model.modules():
        for p in module.parameters(recurse=False):
            at = marks[module].since(begin) if module in marks else 0.0
            found[p] = min(at, found.get(p, at))
    return found


def derive(rows: Rows) -> Rows:
    """Over the resident and the exposed way, and what the hidden one is estimated to take."""
    found = Rows()
    for row in rows:
        same = {name: row[name] for name in ("model", "load")}
        resident = rows.first(**same, way=RESIDENT) or {}
        exposed = rows.first(**same, state=row["state"], way=EXPOSED) or {}
        estimate = None
        if exposed and row.get("late") is not None:
            forward, backward, clip = (exposed[name]["median"] for name in PARTS)
            update = exposed["time"]["median"] - forward - backward - clip
            late = max(row["late"]["median"], update - forward)
            estimate = {"clock": row["time"]["clock"], "median": forward + backward + clip + late}
        found.append({
            **row, "clock": row["time"]["clock"], "estimate": estimate and estimate["median"],
            "of_resident": over(row["time"], resident.get("time")),
            "of_exposed": over(row["time"], exposed.get("time")),
            "host_ms": row["step_host"]["median"] / 1e3, "of_estimate": over(row["time"], estimate),
            "name": f"{row['way']}, {row['state']}",
        })  # fmt: skip
    return found


def color(name: str) -> str:
    """Blue is what this package hides."""
    return BLUE if "hidden" in name else ORANGE if EXPOSED in name else GRAY


COLUMNS: dict[str, Column] = {
    "state": lambda row: f"{row['state']}, {row['way']}", "ms": ms("time"), "÷ resident": ratio("of_resident"),
    "estimate, ms": ms("estimate"), "÷ estimate": ratio("of_estimate"), "host: step()": ms("step_host"),
    "GB at the peak": lambda row: row["peak"] / 1e9,
}  # fmt: skip
MORE: dict[str, Column] = {
    "p10 to p90": spread_ms("time"), "forward": ms("forward"), "backward": ms("backward"), "host: all": ms("host"),
    "pages hidden": formatted("pages_hidden", "{:,.0f}", ""),
}  # fmt: skip
TITLE = "{model} parameters, {load}; ms an iteration ({clock}), a sequence has 1,024 tokens"


def shown(page: Page, rows: Rows, first: Rows) -> None:
    """A table for each model and load of the first, of all in detail."""
    page.table(TITLE, first, COLUMNS, by=("model", "load"))
    page.detail.table(TITLE, rows, {**COLUMNS, **MORE}, by=("model", "load"))


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    shown(page, rows, rows.where(model="1.56 B"))
    page.picture("iterations", rows, [Bars(title="an iteration of {model} parameters, 8 x 1,024 tokens",
        name="name", length="time", unit="ms", scale=1e3, colors=color,
        where={"model": model}) for model in MODELS],
        "State on the device (grey); on the host, its step exposed (orange) and hidden (blue)")  # fmt: skip
    for model in MODELS:
        for state, most in (("float32", 0.9), ("bfloat16", 0.87)):
            page.bar(f"{model}, {state}: hidden over exposed",
                rows.where(model=model, state=state, way=HIDDEN), "of_exposed", at_most=most, unit="x")  # fmt: skip
    for model, most in (("355 M", 1.10), ("1.56 B", 1.06)):
        page.bar(f"{model}, int8: hidden over resident", rows.where(model=model, state="int8", way=HIDDEN),
            "of_resident", at_most=most, unit="x")  # fmt: skip
    for model, most in (("355 M", 1.05), ("1.56 B", 1.03)):
        for state in ("float32", "bfloat16"):
            page.bar(f"{model}, {state}: hidden over its estimate",
                rows.where(model=model, state=state, way=HIDDEN), "of_estimate", at_most=most, unit="x")  # fmt: skip
    for model, state, most in (
        ("355 M", "int8", 2),
        ("355 M", "float32", 2),
        ("1.56 B", "int8", 3),
        ("1.56 B", "float32", 6),
    ):
        page.bar(f"{model}, {state}, hidden: host of step()",
            rows.where(model=model, state=state, way=HIDDEN), "host_ms", at_most=most, unit="ms")  # fmt: skip
