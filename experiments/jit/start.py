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
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import torch

from experiments.lab import BLUE, GRAY, PURPLE, Bar, Bars, Plot, Row, Rows, Run, Table, mib, series
from experiments.works.compiling import OURS, WAYS, work
from experiments.works.fresh import Fresh, empty_caches, fresh
from experiments.works.models import HYPER
from experiments.works.reference import Bound, Reference
from experiments.works.wheels import FULL, reckoned

#: Tensors of 64²: of more a compiler on a CPU makes minutes of work.
TENSORS = {"cuda": 36, "cpu": 8}
#: Seconds after which a process is given up; that a user will wait for.
LIMIT, SOON = 150.0, 1.0
#: Of a build.
CORES_EACH = 4


def started(name: str, device: str, count: int, folder: str, compilers: bool) -> Iterator[Row]:
    """In a process of its own: seconds until a way has its step, until it is done, and of a second one.

    Raises:
        AssertionError: the update is wrong.
    """
    if not compilers:
        os.environ["PATH"] = str(Path(folder) / "no programs")
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


def well(found: Fresh) -> Row:
    """The row of a process that ended well.

    Raises:
        RuntimeError: it did not; with its last words.
    """
    if found.ended:
        raise RuntimeError(reason(found.ended))
    return found.row


def reason(ended: str) -> str:
    """Of a process's last words the last line that names an error, or else the last."""
    lines = ended.strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line or "error:" in line), lines[-1])


def prepared(build: bool, about: tuple[str, str, int, str], compilers: bool | None) -> Row:
    """Build ahead, if a way does, and start it where no program is found, unless ``compilers`` is None: not timed."""
    ahead = well(fresh(built, *about, limit=LIMIT)) if build else {}
    seconds = series([ahead["build"]], "wall") if ahead else None
    found = {"ahead": build, "build": seconds, "tag": ahead.get("tag", "")}
    if compilers is None:
        return {**found, "alone": None, "refusal": "-"}
    ended = fresh(started, *about, compilers, limit=LIMIT).ended
    return {**found, "alone": ended is None, "refusal": reason(ended) if ended else ""}


def timed(repeats: int, about: tuple[str, str, int, str]) -> Row:
    """Processes one after the other, each pair with caches of its own; of toys (0 repeats) the cold one alone."""
    cold, warm, made = [], [], Path(about[-1])
    for _ in range(repeats or 1):
        with empty_caches() as caches:
            cold.append(well(fresh(started, *about, True, limit=LIMIT, caches=caches)))
            if repeats:
                warm.append(well(fresh(started, *about, True, limit=LIMIT, caches=caches)))
            disk = held(caches, made / "site", made / "late.pt2")
    return {
        "cold": series([row["start"] for row in cold], "wall"),
        "again": bool(warm),
        "warm": series([row["start"] for row in warm], "wall") if warm else None,
        "ready": series([row["ready"] for row in warm or cold], "wall"),
        "second": series([row["second"] for row in warm or cold], "wall"),
        "error": max(row["error"] for row in cold + warm),
        "disk": disk,
    }


def measure(run: Run) -> Iterator[Row]:
    """A row per way: seconds, bytes on disk, whether it starts without a compiler, wheels.

    What is not timed by itself comes first, and side by side where there are cores for it.
    """
    kind = run.device.type
    here = {name: way for name, way in WAYS.items() if kind in way.devices and not (run.quick and way.slow)}
    pool, abouts, waiting = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_EACH)), {}, {}
    with ExitStack() as folders:
        for name, way in here.items():
            folder = str(folders.enter_context(empty_caches()))
            abouts[name] = (name, str(run.device), run.size(TENSORS[kind], 2), folder)
            waiting[name] = pool.submit(prepared, way.build is not None, abouts[name], None if run.quick else False)
        folders.callback(pool.shutdown, cancel_futures=True)  # Ctrl-C does not wait for what has not begun
        wait(waiting.values())
        for name, way in run.each(here.items()):
            about = {"case": name, "device": kind, "tensors": abouts[name][2], "wheels": reckoned(way.ships)}
            with run.attempt(name, () if name == OURS else (RuntimeError,)):
                first = waiting[name].result()
                yield {**about, "machines": reckoned(FULL), **first, **timed(run.size(way.repeats, 0), abouts[name])}
    if missing := [name for name, way in WAYS.items() if kind not in way.devices]:
        run.left_out.append(f"{', '.join(missing)}: need a GPU")
    if slow := [name for name, way in WAYS.items() if run.quick and way.slow]:
        run.left_out.append(f"{', '.join(slow)}: take a compiler and tens of seconds")


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
PANELS = [
    Bars(title="first step, cold", unit="s", name="case", length="cold", colors=color),
    Bars(title="first step, warm", unit="s", name="case", length="warm", colors=color, where={"again": True}),
    Bars(title="wheels for every machine", unit="wheels", name="case", length="wheels", colors=color),
    Bars(title="built ahead", unit="s", name="case", length="build", colors=color, where={"ahead": True}),
]
PLOTS = [Plot("start", PANELS, "Who waits, and who builds: AdamW over {tensors} tensors, {device}")]
