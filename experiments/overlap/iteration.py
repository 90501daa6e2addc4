"""What does an iteration of training take with state resident, on the host and exposed, and hidden under the forward?

And what do micro-batches and a larger batch change, and paged or offloaded optimizers of others?

The step of the hidden way is queued by ``attach()``.  An iteration is timed from its begin to that of the next one, on
the stream that computes, while the host runs ahead.  Only the first forward of a step comes behind its update.  A
larger batch has a longer forward, and hides more; its activations are computed twice, so that they fit.

bitsandbytes' PagedAdamW8bit keeps its state in managed memory, which nothing pushes out here: there is room on the
device, so this is its best case.  torchao's CPUOffloadOptimizer updates on the CPU, parameters and state, while the
backward goes on; clipping behind the backward comes too late for it.  Each runs in a process of its own: it may be
absent, and may end the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch

from experiments.child import Child
from experiments.clock import series
from experiments.columns import ms, ratio
from experiments.comparing import over
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import BLUE, GRAY, ORANGE, Bars
from experiments.works.staged import staged
from experiments.works.training import Load, Make, Training
from pagedopt import PagedAdamW
from pagedopt.formats.floating import StateFormat
from pagedopt.planning.sizes import SIZES

ANSWERS = {"iteration": "hidden_step", "loads": "hidden_step", "offloaders": "hidden_step"}
NOTE = "hiding"
NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
FUSED, RESIDENT, EXPOSED, HIDDEN = "torch fused, resident", "resident", "on the host, exposed", "on the host, hidden"
CALLS, NEARLY = "on the host, exposed, call by call", "on the host but for 64 MiB, hidden"
MODELS = {"355 M": "gpt2-medium", "1.56 B": "gpt2-xl"}
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


MICRO, LARGE = Load(micro=4), Load(batch=32, recomputed=True)
LOADS: tuple[Plan, ...] = (
    *(("1.56 B", load, "float32", way) for load in (LARGE, MICRO) for way in (RESIDENT, EXPOSED, HIDDEN)),
    *(("1.56 B", MICRO, "int8", way) for way in (EXPOSED, HIDDEN)),
)
#: Ours, in the same run as others; and of these package, optimizer, format of its state, and models.
BESIDE: tuple[Plan, ...] = tuple(
    (model, Load(), state, way) for model in MODELS for state, way in (("float32", RESIDENT), ("int8", HIDDEN))
)
RIVALS = (
    ("bitsandbytes", "bitsandbytes PagedAdamW8bit, no pressure", "int8", ("355 M", "1.56 B")),
    ("torchao", "torchao CPUOffloadOptimizer", "float32", ("355 M",)),
)
#: Seconds until a rival's process is stopped.
LONGEST = 120


def measure(run: Run) -> Iterator[Row]:
    """A row per model, load, format of state and way."""
    plan = {"iteration": PLAN, "loads": LOADS, "offloaders": BESIDE}[run.part]
    for model, load, state, way in run.each(run.size(plan, plan[-3:])):
        about = {"model": model, "load": str(load), "state": state, "way": way}
        with run.attempt(", ".join(about.values())):
            size = SIZES[run.size(MODELS[model], "tiny")]
            with staged("calls" if way == CALLS else "graph"):
                training = Training(run.device, size, load, maker(way, state))
            if way in (HIDDEN, NEARLY):
                training.optimizer.attach(training.model)
            yield {**about, **timed(run, training)}
            del training
    for package, way, state, models in run.each(RIVALS if run.part == "offloaders" else ()):
        if importlib.util.find_spec(package) is None:
            run.leave_out(f"{package}: not installed")
            continue
        for model in models:
            child = Child(rival, package, MODELS[model], str(run.device), run.quick, limit=LONGEST)
            for row in child:
                yield {"model": model, "load": str(Load()), "state": state, "way": way, **row}
            if child.ended:
                run.leave_out(f"{way}, {model}: its process {child.ended}")


def rival(package: str, size: str, device: str, quick: bool) -> Iterator[Row]:
    """In a process of its own: times of iterations with another package's optimizer."""
    run = Run(torch.device(device), quick)
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    optimizers = importlib.import_module(f"{package}.optim")

    def offloaded(params: Any) -> Any:
        return optimizers.CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True)

    make = offloaded if package == "torchao" else optimizers.PagedAdamW8bit
    yield timed(run, Training(run.device, SIZES["tiny" if quick else size], Load(), make))


def maker(way: str, state: str) -> Make:
    """What makes the optimizer of a way."""
    if way == FUSED:
        return partial(torch.optim.AdamW, fused=True)
    budget = {RESIDENT: None, NEARLY: "64MiB"}.get(way, 0)
    return partial(PagedAdamW, state_format=cast(StateFormat, state), device_budget=budget)


def timed(run: Run, training: Training) -> Row:
    """Times of iterations (µs), and device memory at the peak (bytes)."""
    for _ in range(3):
        training.iterate()
    training.wait()
    training.host.clear()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begins = [training.iterate() for _ in range(run.size(8, 2))]  # of the last one no end is marked: no forward follows
    training.wait()
    whole = [after.since(before) for before, after in itertools.pairwise(begins)]
    return {
        "time": series(whole, "GPU" if run.device.type == "cuda" else "wall"),
        "step_host": series(training.host, "host"),
        "peak": torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0,
    }


def derive(rows: Rows) -> Rows:
    """Over the resident and the exposed way."""
    found = Rows()
    for row in rows:
        same = {name: row[name] for name in ("model", "load")}
        resident = rows.first(**same, way=RESIDENT) or {}
        exposed = rows.first(**same, state=row["state"], way=EXPOSED) or {}
        found.append({
            **row, "clock": row["time"]["clock"], "host_ms": row["step_host"]["median"] / 1e3,
            "of_resident": over(row["time"], resident.get("time")),
            "of_exposed": over(row["time"], exposed.get("time")), "name": f"{row['way']}, {row['state']}",
        })  # fmt: skip
    return found


def color(name: str) -> str:
    """Blue is what this package hides."""
    return BLUE if "hidden" in name else ORANGE if EXPOSED in name else GRAY


def finding(hidden: Rows) -> str:
    """How much shorter an iteration is whose step is hidden."""
    shares = sorted(row["of_exposed"] for row in hidden if row["of_exposed"]) or [1.0]
    return (
        f"Hidden under the forward (blue), {100 * shares[0]:.0f} to {100 * shares[-1]:.0f} % of an iteration with the "
        "step exposed (orange)\ngrey: state on the device"
    )


COLUMNS: dict[str, Column] = {
    "state": lambda row: f"{row['state']}, {row['way']}", "ms": ms("time"), "÷ resident": ratio("of_resident"),
    "host: step()": ms("step_host"), "GB at the peak": lambda row: row["peak"] / 1e9,
}  # fmt: skip
TITLE = "{model} parameters, {load}; ms an iteration ({clock}), a sequence has 1,024 tokens"


def report(page: Page, rows: Rows) -> None:
    """A table for a model and load, a picture, and what is held to a limit."""
    main = Rows(row for row in rows.where(model="1.56 B") if row["way"] not in (CALLS, NEARLY))
    first = {"iteration": main, "loads": rows.where(load=str(LARGE)), "offloaders": rows}
    page.table(TITLE, first[page.section], COLUMNS, by=("model", "load"))
    if page.section == "loads":
        large, micro = rows.where(load=str(LARGE), way=HIDDEN), rows.where(load=str(MICRO), state="int8", way=HIDDEN)
        page.bar("1.56 B, float32, 32 sequences: hidden over resident", large, "of_resident", "≤ 1.05 x")
        page.bar("1.56 B, int8, 4 micro-batches: hidden over resident", micro, "of_resident", "≤ 1.02 x")
    if page.section != "iteration":
        return
    page.picture("iterations", rows, [Bars(title="an iteration of {model} parameters, 8 x 1,024 tokens",
        name="name", length="time", unit="ms", scale=1e3, colors=color,
        where={"model": model}) for model in MODELS],
        finding(rows.where(way=HIDDEN)))  # fmt: skip
    for model, state, what, column, most, unit in BARS:
        mine = rows.where(model=model, state=state, way=HIDDEN)
        page.bar(f"{model}, {state}{what}", mine, column, f"≤ {most} {unit}")


OVER_EXPOSED, HOST = ": hidden over exposed", ", hidden: host of step()"
OVER_RESIDENT = ": hidden over resident"
BARS = (
    ("355 M", "float32", OVER_EXPOSED, "of_exposed", 0.9, "x"),
    ("355 M", "bfloat16", OVER_EXPOSED, "of_exposed", 0.87, "x"),
    ("1.56 B", "float32", OVER_EXPOSED, "of_exposed", 0.9, "x"),
    ("1.56 B", "bfloat16", OVER_EXPOSED, "of_exposed", 0.87, "x"),
    ("355 M", "int8", OVER_RESIDENT, "of_resident", 1.10, "x"),
    ("1.56 B", "int8", OVER_RESIDENT, "of_resident", 1.06, "x"),
    ("355 M", "int8", HOST, "host_ms", 2, "ms"),
    ("355 M", "float32", HOST, "host_ms", 2, "ms"),
    ("1.56 B", "int8", HOST, "host_ms", 3, "ms"),
    ("1.56 B", "float32", HOST, "host_ms", 6, "ms"),
)
