"""How long does a process wait for its first step, by when and by what the step was compiled?

Answer: see notes/jit_or_aot.md.

The clock starts when torch is imported, parameters and gradients are made and an optimizer of torch is constructed,
which loads much of torch; it stops when the first step is done.  So a way's imports, its compiling or loading, and the
step are in it.  *Cold* are empty caches, *warm* is what the cold process left in them.  Each is a process of its own,
whose times count if four of its steps are right.  One more cold process finds no program in its PATH: a way that needs
a compiler fails there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from experiments.lab import BLUE, GRAY, PURPLE, Bar, Bars, Plot, Row, Rows, Run, Table, mib, series
from experiments.works.compiling import OURS, WAYS, Way, work
from experiments.works.fresh import Fresh, empty_caches, fresh
from experiments.works.models import HYPER
from experiments.works.reference import Bound, Reference
from experiments.works.wheels import FULL, reckoned

#: Tensors of 64²: of more a compiler on a CPU makes minutes of work.
TENSORS = {"cuda": 100, "cpu": 8}
#: Seconds after which a process is given up; that a user will wait for.
LIMIT, SOON = 150.0, 1.0
REPEATS = 3


def started(name: str, device: str, count: int, folder: str, compilers: bool) -> Iterator[Row]:
    """In a process of its own: seconds until a way has its step, until it is done, and of a second one.

    Raises:
        AssertionError: the update is wrong.
    """
    if not compilers:
        os.environ["PATH"] = os.devnull
        for variable in ("CC", "CXX", "CUDA_HOME"):
            os.environ.pop(variable, None)
    where = torch.device(device)
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
    step()
    second = now()
    error = Reference(work(count).parameters(where)).error(params, Bound(step, 2))
    if not error <= work(count).tolerance:
        raise AssertionError(f"its update is off by {error:.2g} of itself")
    yield {"ready": ready - begin, "start": first - begin, "second": 1e6 * (second - first), "error": error}


def built(name: str, device: str, count: int, folder: str) -> Iterator[Row]:
    """In a process of its own: seconds to build ahead, and the tag of the wheel."""
    build, begin = WAYS[name].build, time.perf_counter()
    assert build is not None
    tag = build(torch.device(device), count, Path(folder))
    yield {"build": time.perf_counter() - begin, "tag": tag}


def held(*paths: Path) -> int:
    """Bytes of files, in folders too."""
    return sum(it.stat().st_size for path in paths for it in (path, *path.rglob("*")) if it.is_file())


def timed(run: Run, name: str, way: Way, made: Path) -> Row:
    """What came of a way's processes.

    Raises:
        RuntimeError: one failed; as it was said.
    """
    count = run.size(TENSORS[run.device.type], 2)
    begin = partial(fresh, limit=LIMIT)
    about = (name, str(run.device), count, str(made))
    ahead = well(begin(built, *about)).row if way.build else {}
    start = partial(begin, started, *about)
    cold, warm = [], []
    for _ in range(1 if way.slow or run.quick else REPEATS):
        with empty_caches() as caches:
            cold.append(well(start(True, caches=caches)).row)
            warm.append(well(start(True, caches=caches)).row)
            disk = held(caches, made / "site", made / "late.pt2")
    return {
        "case": name,
        "device": run.device.type,
        "tensors": count,
        "cold": series([row["start"] for row in cold], "wall"),
        "warm": series([row["start"] for row in warm], "wall"),
        "ready": series([row["ready"] for row in warm], "wall"),
        "second": series([row["second"] for row in warm], "wall"),
        "error": max(row["error"] for row in cold + warm),
        "disk": disk,
        "build": series([ahead["build"]], "wall") if ahead else None,
        "tag": ahead.get("tag", ""),
        **without(start(False) if not run.quick else None),
        "wheels": reckoned(way.ships),
        "machines": reckoned(FULL),
    }


def without(found: Fresh | None) -> Row:
    """Whether it starts where no program is found, and with which words it does not; nothing of toys."""
    if found is None:
        return {"alone": None, "refusal": "-"}
    return {"alone": found.ended is None, "refusal": (found.ended or "").strip().rpartition("\n")[2]}


def well(found: Fresh) -> Fresh:
    """A process that ended well.

    Raises:
        RuntimeError: it did not.
    """
    if found.ended:
        raise RuntimeError(found.ended.strip().splitlines()[-1])
    return found


def measure(run: Run) -> Iterator[Row]:
    """A row per way: seconds, bytes on disk, whether it starts without a compiler, wheels."""
    here = {name: way for name, way in WAYS.items() if run.device.type in way.devices}
    for name, way in run.each(here.items()):
        if run.quick and way.slow:
            run.left_out.append(f"{name}: takes a compiler and tens of seconds")
            continue
        with run.attempt(name, () if name == OURS else (RuntimeError,)), empty_caches() as made:
            yield timed(run, name, way, made)
    if missing := [name for name in WAYS if name not in here]:
        run.left_out.append(f"{', '.join(missing)}: need a GPU")


def others(rows: Rows) -> tuple[float, str]:
    """Ways but ours that start soon with empty caches, without a compiler, and that one wheel is enough for."""
    soon = [row for row in rows if row["cold"]["median"] <= SOON and row["alone"] and row["wheels"] == 1]
    names = [row["case"] for row in soon if row["case"] != OURS]
    return len(names), f" ({', '.join(names)})" if names else ""


def color(name: str) -> str:
    """Ours, what a compiler of torch makes, and what is written in C++ or CUDA."""
    return BLUE if name == OURS else PURPLE if name in ("torch.compile", "AOTInductor", "Triton") else GRAY


TABLES = [
    Table("{tensors} tensors of 64² on {device}, wall times; wheels for {machines} kinds of machines", {
        "way": "case", "built ahead, s": "build", "cold, s": "cold", "warm, s": "warm", "before the step, s": "ready",
        "second step, µs": "second", "on disk, MiB": mib("disk"),
        "without a compiler": lambda row: row["refusal"][:60] or "yes", "wheels": "wheels", "tag": "tag",
        "error": "error",
    })
]  # fmt: skip
BARS = [
    Bar("first step of ours, cold", "cold", at_most=0.5, unit="s", case=OURS, device="cuda"),
    Bar("first step of ours, warm", "warm", at_most=0.3, unit="s", case=OURS, device="cuda"),
    Bar("other ways with neither compiler nor a wheel per version that start in 1 s", others, at_most=0, device="cuda"),
]
SHOWN = {"cold": "first step, cold", "warm": "first step, warm", "build": "built ahead"}
PANELS = [Bars(title=title, unit="s", name="case", length=column, colors=color) for column, title in SHOWN.items()]
WHEELS = Bars(title="wheels for every machine", unit="wheels", name="case", length="wheels", colors=color)
PLOTS = [Plot("start", [*PANELS, WHEELS], "Who waits, and who builds: AdamW over {tensors} tensors, {device}")]
