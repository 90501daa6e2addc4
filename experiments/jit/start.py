"""How long does a process wait for its first step, by when and by what the step was compiled?

Answer: see notes/jit_or_aot.md.

The clock starts when torch is imported, parameters and gradients are made and an optimizer of torch is constructed,
which loads much of torch; it stops when the first step is done.  So a way's imports, its compiling or loading, and the
step are in it.  *Cold* are empty caches, *warm* is what the cold process left in them.  Each is a process of its own,
whose times count if four of its steps are right.  One more cold process, before them and not timed, finds no program in
its PATH: a way that needs a compiler fails there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.lab import BLUE, GRAY, PURPLE, Bar, Bars, Plot, Row, Rows, Run, Table, series
from experiments.works.compiling import OURS, WAYS, work
from experiments.works.fresh import Fresh, empty_caches, fresh
from experiments.works.models import HYPER
from experiments.works.reference import Bound, Reference

#: Tensors of 64²: of more a compiler on a CPU makes minutes of work.
TENSORS = {"cuda": 36, "cpu": 8}
#: Seconds after which a process is given up; that a user will wait for.
LIMIT, SOON = 150.0, 1.0
#: A way, the device, how many tensors, the folder with what is built ahead.
About = tuple[str, str, int, str]


def started(name: str, device: str, count: int, folder: str, compilers: bool) -> Iterator[Row]:
    """In a process of its own: seconds until a way has its step, and until that is done.

    Raises:
        AssertionError: the update is wrong.
    """
    if not compilers:
        os.environ["PATH"] = str(Path(folder) / "no programs")
        for variable in ("CC", "CXX", "CUDA_HOME"):
            os.environ.pop(variable, None)
    where = torch.device("cpu" if WAYS[name].on_cpu else device)
    params = work(count).parameters(where)
    torch.optim.AdamW(work(1).parameters(where), **HYPER)

    def now() -> float:
        if where.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = now()
    step = WAYS[name].start(params, Path(folder))
    ready = now()
    step()
    first = now()
    error = Reference(work(count).parameters(where)).error(params, Bound(step, 1))
    if not error <= work(count).tolerance:
        raise AssertionError(f"its update is off by {error:.2g} of itself")
    yield {"ready": ready - begin, "start": first - begin}


def built(name: str, device: str, _: int, folder: str) -> Iterator[Row]:
    """In a process of its own: seconds to build ahead, and the tag of the wheel."""
    build, begin = WAYS[name].build, time.perf_counter()
    assert build is not None
    tag = build(torch.device(device), Path(folder))
    yield {"build": time.perf_counter() - begin, "tag": tag}


def well(found: Fresh) -> Row:
    """The row of a process that ended well, and how long it was there.

    Raises:
        RuntimeError: it did not; with its last words.
    """
    if found.ended:
        raise RuntimeError(reason(found.ended))
    return {**found.row, "process": found.seconds}


def reason(ended: str) -> str:
    """Of a process's last words the last line that names an error, or else the last."""
    lines = ended.strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line or "error:" in line), lines[-1])


def seconds(rows: Sequence[Row], column: str) -> dict[str, Any] | None:
    """A column of processes as a series; None where there was no process."""
    return series([row[column] for row in rows], "wall") if rows else None


def prepared(about: About) -> Row:
    """Build ahead, if a way does, and start it where no program is found: the start is not timed."""
    ahead = [well(fresh(built, *about, limit=LIMIT))] if WAYS[about[0]].build else []
    ended = fresh(started, *about, False, limit=LIMIT).ended
    refusal = reason(ended) if ended else ""
    return {"build": seconds(ahead, "build"), "tag": ahead[0]["tag"] if ahead else "", "refusal": refusal}


def timed(about: About, repeats: int) -> Row:
    """Processes one after the other, each pair with caches of its own; of toys (0 repeats) a cold one alone."""
    cold, warm = [], []
    for _ in range(repeats or 1):
        with empty_caches() as caches:
            cold.append(well(fresh(started, *about, True, limit=LIMIT, caches=caches)))
            if repeats:
                warm.append(well(fresh(started, *about, True, limit=LIMIT, caches=caches)))
    return {
        "cold": seconds(cold, "start"),
        "warm": seconds(warm, "start"),
        "ready": seconds(warm, "ready"),
        "process": seconds(cold, "process"),
        "again": bool(warm),
    }


def measure(run: Run) -> Iterator[Row]:
    """A row per way: seconds, and whether it starts without a compiler."""
    kind = run.device.type
    here = {name: way for name, way in WAYS.items() if kind in way.devices and not (run.quick and way.slow)}
    for name, way in run.each(here.items()):
        with run.attempt(name, () if OURS in name else (RuntimeError,)), empty_caches() as folder:
            about = (name, str(run.device), run.size(TENSORS[kind], 2), str(folder))
            alone = {"build": None, "tag": "", "refusal": "not tried"} if run.quick else prepared(about)
            yield {
                "case": name,
                "device": kind,
                "tensors": about[2],
                **alone,
                **timed(about, run.size(way.repeats, 0)),
            }
    if missing := [name for name in WAYS if name not in here]:
        run.leave_out(f"{', '.join(missing)}: need a GPU{', or are too slow for toys' if run.quick else ''}")


def others(rows: Rows) -> tuple[float, str]:
    """Ways but ours that start soon with empty caches, without a compiler, and with nothing built ahead."""
    soon = [row for row in rows if row["cold"]["median"] <= SOON and not row["refusal"] and row["build"] is None]
    names = [row["case"] for row in soon if OURS not in row["case"]]
    return len(names), f" ({', '.join(names)})" if names else ""


def color(name: str) -> str:
    """Ours, what a compiler of torch makes, and what is written in C++ or CUDA."""
    return BLUE if OURS in name else PURPLE if name in ("torch.compile", "Triton") else GRAY


TABLES = [
    Table("{tensors} tensors of 64² on {device}, wall times", {
        "way": "case", "built ahead, s": "build", "cold, s": "cold", "warm, s": "warm",
        "warm, before the step, s": "ready", "cold, the whole process, s": "process",
        "without a compiler": lambda row: row["refusal"][:60] or "yes", "tag": "tag",
    })
]  # fmt: skip
BARS = [
    Bar("first step of ours, cold", "cold", at_most=0.5, unit="s", case=OURS),
    Bar("first step of ours, warm", "warm", at_most=0.3, unit="s", case=OURS),
    Bar("others that start in 1 s with neither a compiler nor a wheel per version", others, at_most=0, device="cuda"),
]
PANELS = [
    Bars(title="first step, cold", unit="s", name="case", length="cold", colors=color),
    Bars(title="first step, warm", unit="s", name="case", length="warm", colors=color, where={"again": True}),
]
PLOTS = [Plot("start", PANELS, "Who waits: AdamW over {tensors} tensors, {device}")]
