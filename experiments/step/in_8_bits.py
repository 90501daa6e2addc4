"""How close is a step whose state has 8 bits to a copy of its bytes: on the device, away, and on a CPU?

Answer (H200, 2026-11): on the device at 82 % of a copy of its bytes; away in 12 ms.

On the device everyone steps over the same 268 M float32 parameters, in interleaved rounds with a copy of the bytes that
a step with state in 8 bits must move: 16.06 for each parameter.  Away, all state crosses the link in both directions;
beside it, a copy of as many bytes both ways, and a plain kernel that reads and writes host memory where it lies.
On a CPU, all state is in RAM, and then all in a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from experiments.lab import (
    Case,
    Column,
    Page,
    Row,
    Rows,
    Run,
    by_clock_of,
    error,
    ms,
    on_own_clock,
    over,
    percent,
    ratio,
    spread_ms,
)
from experiments.pictures import Bars
from experiments.works import contenders
from experiments.works.contenders import BITS_8, COPY, OURS, color
from experiments.works.link import BOTH, IN_PLACE, MOVES, Link
from experiments.works.models import Work
from experiments.works.paged import FULL, QUICK, Problem

#: The name of the experiment's note.
NOTE = "int8"
MEASURES = ("kernels", "formats", "launch", "tables", "optim", "paging", "placements", "system/state_file.py")
NEAREST, STOCHASTIC = f"{OURS}, int8 nearest", f"{OURS}, int8 stochastic"
#: As it is by default where the second moment decays fast.
M_ALONE = f"{OURS}, int8, m stochastic"
RIVAL = "bitsandbytes AdamW8bit"
BOTH_WAYS = "copy both ways"
INT8: dict[str, dict[str, Any]] = {
    NEAREST: {"state_format": "int8", "rounding": "nearest"},
    STOCHASTIC: {"state_format": "int8", "rounding": "stochastic"},
    M_ALONE: {"state_format": "int8", "betas": (0.9, 0.95)},
}
#: Bytes that a step with state in 8 bits moves for each float32 parameter.
MOVED = 12 + 2 * BITS_8
ON_CPU = Work("16 M fp32", [(1_000_000,)] * 16)
IN_A_FILE = Work("67 M fp32", [(4_194_304,)] * 16)
#: Numbers of thread blocks of a step in place.
BLOCKS = (None, 32, 8)


def measure(run: Run) -> Iterator[Row]:
    """A row per place and contender: host, gpu and wall times (µs), the error of its update, the bytes it moves."""
    run.rounds, run.seconds = run.size((20, 1.0), (3, 0.1))
    if run.device.type == "cuda":
        yield from resident(run, Problem(run).work)
        yield from away(run)
    else:
        run.left_out.append("on the device, and away from it: need a GPU")
    on_cpu = run.size(ON_CPU, Work("24,000 fp32", [(8000,)] * 3))
    yield from resident(run, on_cpu, torch.device("cpu"))
    yield from in_a_file(run, run.size(IN_A_FILE, on_cpu))


def resident(run: Run, work: Work, device: torch.device | None = None) -> Iterator[Row]:
    """Everyone with all state where the parameters are."""
    device = device or run.device
    builds = {OURS: contenders.ours(), **{name: contenders.ours(**how) for name, how in INT8.items()}}
    if device.type == "cuda":
        builds |= {name: contenders.CONTENDERS[name].build for name in contenders.installed(run, [RIVAL])}
    loose = Work(work.name, work.shapes, work.dtype, MOVED, 0.1)  # state in 8 bits takes an update off by that
    cases, errors = contenders.checked(run, loose, builds, device)
    cases.append(contenders.copy_of_bytes(loose, device))
    about = {"place": "resident", "device": device.type, "work": work.name, "numel": work.numel}
    for name, timing in run.measure(cases, device=device).items():
        each = 28 if name == OURS else MOVED
        yield {**about, "case": name, "bytes": round(each * work.numel), "error": errors.get(name), **timing}


def away(run: Run) -> Iterator[Row]:
    """All state on the host: staged, in place, and what the link can do."""
    problem = Problem(run)
    work, link = run.size(FULL, QUICK), Link.of(run)
    nbytes = BITS_8 * work.numel
    about = {"place": "away", "device": "cuda", "work": work.name, "numel": work.numel}
    blocks, _ = link.best_blocks(run)
    plain = run.measure([case for case in link.cases(blocks) if case.name in (BOTH, IN_PLACE)])
    for moves, name in ((BOTH, BOTH_WAYS), (IN_PLACE, IN_PLACE)):
        known = {"case": name, "bytes": sum(MOVES[moves]) * link.nbytes, "error": None}
        yield {**about, **known, **plain[moves]}
    del link
    run.free()
    ways: dict[str, dict[str, Any]] = {"staged": {"host_access": "staged"}}
    ways |= {f"in place, {n or 'all'} blocks": {"host_access": "in_place", "blocks": n} for n in BLOCKS}
    for name, how in INT8.items():
        steps = {
            f"{name}, {way}": contenders.ours(device_budget=0, **how, **more)(problem.parameters()).step
            for way, more in ways.items()
        }
        for case, timing in run.measure([Case(case, step) for case, step in steps.items()]).items():
            yield {**about, "case": case, "bytes": 2 * nbytes, "error": None, **timing}
        del steps
        run.free()


def in_a_file(run: Run, work: Work) -> Iterator[Row]:
    """All state of a CPU's parameters in a file, whose pages leave the memory as soon as they are done with."""
    about = {"place": "in a file", "device": "cpu", "work": work.name, "numel": work.numel, "error": None}
    on_cpu = torch.device("cpu")
    build = {
        name: contenders.ours(placement="file", device_budget=0, **how) for name, how in {OURS: {}, **INT8}.items()
    }
    cases = [Case(name, make(work.parameters(on_cpu)).step) for name, make in build.items()]
    for case, timing in run.measure(cases, device=on_cpu).items():
        nbytes = 2 * (8 if case == OURS else BITS_8) * work.numel
        yield {**about, "case": case, "bytes": round(nbytes), **timing}


def derive(rows: Rows) -> Rows:
    """The share of a copy of the same bytes, of the plain kernel's rate in place, and times over bitsandbytes' step."""
    found = Rows()
    for group in map(on_own_clock, rows.groups("place", "device")):
        copy, rival, mine = (group.first(case=case) for case in (COPY, RIVAL, OURS))
        plain = group.first(case=IN_PLACE)
        for row in group:
            row = {**row, "rate": row["bytes"] / row["time"]["median"] / 1e3, "ms": row["time"]["median"] / 1e3}
            rate = plain and plain["bytes"] / plain["time"]["median"] / 1e3
            row["share"] = contenders.of_copy(row, copy) if row["case"] != OURS else None
            row["share_in_place"] = 100 * row["rate"] / rate if rate and "in place" in row["case"] else None
            row["over_rival"] = over(rival and rival["wall"], row["wall"])  # its step waits for the device
            row["over_fp32"] = over(by_clock_of(row, mine), row["time"])
            found.append(row)
    return found


GPU: dict[str, Any] = {"place": "resident", "device": "cuda"}
CPU: dict[str, Any] = {"place": "resident", "device": "cpu"}
PANELS = [Bars(title="{work}, {device}", name="case", length="time", unit="ms", scale=1e3, line=COPY, colors=color)]


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    columns: dict[str, Column] = {"step": "case", "ms": ms("time"), "of a copy": percent("share"),
        "of the plain kernel": percent("share_in_place"), "bitsandbytes ÷ it (wall)": ratio("over_rival"),
        "float32 ÷ it": ratio("over_fp32"), "error": error()}  # fmt: skip
    more: dict[str, Column] = {"p10 to p90": spread_ms("time"), "GB/s": "rate", "by": "clock"}
    for place in ("resident", "away"):
        page.table("{place}, {device}: {work}", rows.where(place=place, device="cuda"), columns)
    page.detail.table("{place}, {device}: {work}", rows, {**columns, **more}, by=("place", "device"))
    page.picture("in-8-bits", rows.where(place="resident", device=rows[0]["device"]), PANELS,
        "Steps with all state on the device, and a copy of the bytes in 8 bits (dashed)",
        by=("place", "device"))  # fmt: skip
    page.bar("resident, nearest, share of a copy", rows.where(case=NEAREST, **GPU), "share", at_least=75, unit="%")
    page.bar("resident, stochastic, share of a copy", rows.where(case=STOCHASTIC, **GPU), "share",
        at_least=70, unit="%")  # fmt: skip
    page.bar("resident, nearest, speed over bitsandbytes", rows.where(case=NEAREST, **GPU), "over_rival",
        at_least=5.5, unit="x")  # fmt: skip
    page.bar("all away, staged, ms", rows.where(place="away", case=f"{NEAREST}, staged"), "ms", at_most=12.5, unit="ms")
    page.bar("all away, in place, of the plain kernel",
        rows.where(place="away", case=f"{NEAREST}, in place, all blocks"), "share_in_place", at_least=75,
        unit="%")  # fmt: skip
    page.bar("CPU, nearest, speed over float32", rows.where(case=NEAREST, **CPU), "over_fp32", at_least=0.45, unit="x")
    page.bar("CPU, stochastic, speed over float32", rows.where(case=STOCHASTIC, **CPU), "over_fp32",
        at_least=0.3, unit="x")  # fmt: skip
    page.bar("in a file, nearest, speed over float32", rows.where(case=NEAREST, place="in a file"),
        "over_fp32", at_least=3, unit="x")  # fmt: skip
