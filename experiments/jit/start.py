"""How long does a process wait for its first step, by when and by what the step was compiled?

Answer: see notes/jit_or_aot.md.

The clock starts when torch is imported, parameters and gradients are made and an optimizer of torch is constructed,
which loads much of torch; it stops when the first step is done.  So a way's imports, its compiling or loading, and the
step are in it.  *Cold* are empty caches, *warm* is what the cold process left in them.  Each is a process of its own,
whose times count if four of its steps are right, and finds no program in its PATH: a way that needs a compiler fails
there, and is started again with those that there are.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run, series
from experiments.pictures import BLUE, GRAY, Bars
from experiments.works.compiling import OURS, WAYS, Way, work
from experiments.works.fresh import empty_caches, fresh
from experiments.works.models import HYPER
from experiments.works.reference import Bound, Reference

MEASURES = ("kernels", "launch", "tables", "optim", "system")
#: Tensors of 64²: of more a compiler on a CPU makes minutes of work.
TENSORS = {"cuda": 36, "cpu": 8}
#: Seconds after which a process is given up; that a user will wait for.
LIMIT, SOON = 150.0, 1.0


def started(name: str, device: str, count: int, folder: str, compilers: bool) -> Iterator[Row]:
    """In a process of its own: seconds until the first step of a way is done.

    Raises:
        AssertionError: the update is wrong.
    """
    if compilers:
        os.environ["PATH"] += f":{Path(sys.executable).parent}"  # pip puts ninja there
    else:
        os.environ["PATH"] = str(Path(folder) / "no programs")
        for variable in ("CC", "CXX", "CUDA_HOME"):
            os.environ.pop(variable, None)
    where = torch.device("cpu" if WAYS[name].on_cpu else device)
    params = work(count).parameters(where)
    torch.optim.AdamW(work(1).parameters(where), **HYPER)

    wait = torch.cuda.synchronize if where.type == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    step = WAYS[name].start(params, Path(folder))
    step()
    wait()
    first = time.perf_counter() - begin
    error = Reference(work(count).parameters(where)).error(params, Bound(step, 1))
    if not error <= work(count).tolerance:
        raise AssertionError(f"its update is off by {error:.2g} of itself")
    yield {"first": first}


def reason(ended: str) -> str:
    """Of a process's last words the last line that names an error, or else the last."""
    lines = ended.strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line or "error:" in line), lines[-1])


def timed(repeats: int, *about: Any) -> Row:
    """Processes one after the other, each pair with caches of its own; of toys (0 repeats) a cold one alone.

    Raises:
        RuntimeError: one did not end well; with its last words.
    """
    found: dict[str, list[Row]] = {"cold": [], "warm": []}
    for _ in range(repeats or 1):
        with empty_caches() as caches:
            for kind in list(found)[: 1 + bool(repeats)]:
                one = fresh(started, *about, limit=LIMIT, caches=caches)
                if one.ended:
                    raise RuntimeError(reason(one.ended))
                found[kind].append({**one.row, "process": one.seconds})

    def seconds(kind: str, column: str) -> dict[str, Any] | None:
        return series([row[column] for row in found[kind]], "wall") if found[kind] else None

    times = {"cold": seconds("cold", "first"), "warm": seconds("warm", "first")}
    return {**times, "process": seconds("cold", "process"), "again": bool(repeats)}


def of_way(way: Way, repeats: int, *about: Any) -> Row:
    """Build ahead, if a way does, and start it without compilers, or else with them."""
    begin, (_, device, _, folder) = time.perf_counter(), about
    tag = way.build(torch.device(device), Path(folder)) if way.build else ""
    ahead = {"tag": tag, "build": series([time.perf_counter() - begin], "wall") if way.build else None}
    try:
        return {**ahead, **timed(repeats, *about, False), "refusal": ""}
    except RuntimeError as error:
        return {**ahead, **timed(repeats, *about, True), "refusal": str(error)}


def measure(run: Run) -> Iterator[Row]:
    """A row per way: seconds, and whether it starts without a compiler."""
    kind, count = run.device.type, run.size(TENSORS[run.device.type], 2)
    here = {name: way for name, way in WAYS.items() if kind in way.devices and not (run.quick and way.slow)}
    for name, way in run.each(here.items()):
        with run.attempt(name, () if OURS in name else (RuntimeError,)), empty_caches() as folder:
            row = of_way(way, run.size(way.repeats, 0), name, str(run.device), count, str(folder))
            yield {"case": name, "device": kind, "tensors": count, **row}
    if missing := [name for name in WAYS if name not in here]:
        run.leave_out(f"{', '.join(missing)}: need a GPU{', or are too slow for toys' if run.quick else ''}")


def convenient(rows: Rows) -> str:
    """Ways that start soon with empty caches, without a compiler, and with nothing built ahead."""
    soon = [row for row in rows if row["cold"]["median"] <= SOON and not row["refusal"] and row["build"] is None]
    names = ", ".join(row["case"] for row in soon if row["device"] == "cuda")
    return names and f"Start cold within {SOON:g} s, with no compiler and no wheel of their own: {names}."


def color(name: str) -> str:
    """Ours, and others."""
    return BLUE if OURS in name else GRAY


PANELS = [
    Bars(title="cold: with empty caches", unit="s", name="case", length="cold", colors=color),
    Bars(title="warm: with filled ones", unit="s", name="case", length="warm", colors=color, where={"again": True}),
]


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, a picture, and what is held to a limit."""
    page.table("{tensors} tensors of 64² on {device}, wall times", rows,
        {"way": "case", "built ahead, s": "build", "cold, s": "cold", "warm, s": "warm",
        "cold, the whole process, s": "process",
        "without a compiler": lambda row: row["refusal"][:60] or "yes", "tag": "tag"})  # fmt: skip
    page.say(convenient(rows))
    page.picture("start", rows, PANELS, "How long the first step of AdamW takes, {tensors} tensors, {device}")
    page.bar("first step of ours, cold", rows.where(case=OURS), "cold", at_most=0.5, unit="s")
    page.bar("first step of ours, warm", rows.where(case=OURS), "warm", at_most=0.3, unit="s")
