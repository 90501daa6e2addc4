"""How close is a step of PagedAdamW to a copy of its bytes, by format, and how far from the steps of others?

Answer (H200, 2026-11): 95 % of a copy at 124 M float32 parameters, 96 % at 1 B, where torch's fused step has 81 %; with
1,000 tiny tensors the GPU needs 10 µs where torch fused needs 168, and the rest is Python.  With everything in bfloat16
85 %, torch's 61: the conversions and the reading of the table weigh twice as much.  On an H100, with state in 8 bits 70
to 76 %; with all of it on the host a step of 268 M parameters takes 13 ms.

All contenders of a work step in interleaved rounds, each over its own copy of the same random parameters, after four of
its updates were held to float64.  The reference is a copy that reads and writes as many bytes as our update must: 28
per float32 parameter (parameter, gradient and two moments read, all but the gradient written), 16.06 with state in 8
bits.  The share of a contender that moves fewer bytes is that of its own bytes.

Away, all state crosses the link in both directions; beside it, a copy of as many bytes both ways, and a plain kernel
that reads and writes host memory where it lies.  On a CPU, all state is in RAM, and then all in a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from experiments.clock import Case
from experiments.columns import error, ms, percent, ratio
from experiments.comparing import by_clock_of, on_own_clock, over
from experiments.lab import Column, Page, Row, Rows, Run, number
from experiments.pictures import Bars
from experiments.works import builds, contenders
from experiments.works.contenders import color
from experiments.works.in_place import InPlace
from experiments.works.link import BOTH, IN_PLACE, MOVES
from experiments.works.models import BITS_8, COMPILED, COPY, FOREACH, FUSED, GRAPH, LOOP, OURS, Work, gpt2_shapes
from experiments.works.paged import FULL, QUICK, Problem
from experiments.works.steps import checked, copy_of_bytes, of_copy
from pagedopt.optim.registry import OPTIMIZERS

ANSWERS = {
    "close_to_a_copy": "fused_step", "in_16_bits": "in_16_bits", "in_8_bits": "in_8_bits",
    "every_optimizer": "every_optimizer",
}  # fmt: skip
NOTE = {"in_16_bits": "int8", "in_8_bits": "int8"}
MEASURES = ("kernels", "formats", "launch", "tables", "optim", "paging", "placements", "system/state_file.py")
TORCH = (FUSED, FOREACH, LOOP, GRAPH)
#: Work → who steps over it on the GPU, and on the CPU.
ON_GPU = {
    "gpt2": (OURS, f"{OURS}, managed state", *TORCH, COMPILED),
    "gpt2-bf16": (OURS, *TORCH),
    "1b": (OURS, FUSED, FOREACH),
    "1000": (OURS, *TORCH),
    "5000": (OURS, FUSED, FOREACH, GRAPH),
}
#: Bytes that torch's steps move for each bf16 parameter: their moments are bf16, ours float32.
BF16, TORCH_MOVES = "gpt2-bf16", 14
ON_CPU = dict.fromkeys(("5000", "50m"), (OURS, FUSED, FOREACH))
NEAREST, STOCHASTIC = f"{OURS}, int8 nearest", f"{OURS}, int8 stochastic"
INT8: dict[str, dict[str, Any]] = {
    NEAREST: {"state_format": "int8", "rounding": "nearest"},
    STOCHASTIC: {"state_format": "int8", "rounding": "stochastic"},
    f"{OURS}, int8, m stochastic": {"state_format": "int8", "betas": (0.9, 0.95)},  # by default, as v decays fast
}
#: What is not at its default where each optimizer steps: without momentum SGD has no state.
MOMENTUM = {"PagedSGD": {"momentum": 0.9}}
RIVAL, BOTH_WAYS = "bitsandbytes AdamW8bit", "copy both ways"
#: Bytes that a step with state in 8 bits moves for each float32 parameter.
MOVED = 12 + 2 * BITS_8


def works(quick: bool) -> dict[str, Work]:
    """The parameters of each work, by its key."""
    gpt2 = gpt2_shapes(500, 16, 32, 2) if quick else gpt2_shapes()
    billion = [(64, 64)] * 2 if quick else [(4096, 4096)] * 60
    fifty = [(1000,)] * 12 if quick else [(4_166_667,)] * 12
    some, many = (20, 100) if quick else (1000, 5000)
    # Last is the error that an update may have. bf16 has 8 significant bits: of a parameter of 0.02, an update of 1e-3
    # is a few units in the last place.
    return {
        "gpt2": Work("AdamW fp32, GPT-2 124M (148 tensors)", gpt2, torch.float32, 28, 5e-5),
        "gpt2-bf16": Work("AdamW bf16 with fp32 state, GPT-2 124M", gpt2, torch.bfloat16, 22, 5e-2),
        "1b": Work("AdamW fp32, 1 B (60 x 4096²)", billion, torch.float32, 28, 5e-5),
        "1000": Work(f"{some:,} x (2, 3)", [(2, 3)] * some, torch.float32, 28, 5e-5),
        "5000": Work(f"{many:,} x (2, 3)", [(2, 3)] * many, torch.float32, 28, 5e-5),
        "50m": Work("50 M in 12 tensors", fifty, torch.float32, 28, 5e-5),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """What takes long."""
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the foreach step on GPT-2, too")


def measure(run: Run) -> Iterator[Row]:
    """A row per contender and work: host, gpu and wall times (µs), the error of its update, the bytes it must move."""
    if run.part == "in_16_bits":
        shapes = gpt2_shapes(500, 16, 32, 2) if run.quick or run.device.type == "cpu" else gpt2_shapes()
        work = Work("AdamW bf16 with bf16 state, GPT-2", shapes, torch.bfloat16, 14, 2e-1)
        yield from steps(run, "all-bf16", work, (OURS, FUSED, FOREACH), run.device)
        return
    if run.part == "in_8_bits":
        yield from in_8_bits(run)
        return
    if run.part == "every_optimizer":
        yield from every_optimizer(run)
        return
    cpu, cuda = torch.device("cpu"), run.device.type == "cuda"
    stepped = [(key, names, run.device) for key, names in ON_GPU.items() if cuda]
    if not cuda:
        run.left_out.append("the GPU's bars: need a GPU")
    if not run.options.compile:
        run.left_out.append("torch.compile: takes 15 s and more; add --compile")
    for key, names, device in run.each([*stepped, *((key, names, cpu) for key, names in ON_CPU.items())]):
        asked = tuple(name for name in names if run.options.compile or name != COMPILED)
        yield from steps(run, key, works(run.quick)[key], asked, device)


def steps(run: Run, key: str, work: Work, names: tuple[str, ...], device: torch.device) -> Iterator[Row]:
    """Check and time everyone over one work; nothing if it does not fit."""
    makes = {name: contenders.CONTENDERS[name].build for name in contenders.installed(run, names)}
    if key == BF16:
        makes[OURS] = builds.ours(state_format="float32")
    needed = work.numel * (8 + 16 * len(makes) + 32)
    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
        run.leave_out(f"{work.name}: needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return
    cases, errors = checked(run, work, makes, device)
    if len(work.shapes) < 1000:
        cases.append(copy_of_bytes(work, device))
    about = {"key": key, "work": work.name, "device": device.type, "numel": work.numel}
    for name, timing in run.measure(cases, device=device).items():
        yield {**about, "bytes": work.bytes_each * work.numel, "case": name, "error": errors.get(name), **timing}


def every_optimizer(run: Run) -> Iterator[Row]:
    """Each class at its defaults (SGD with momentum), beside a copy of the bytes of its own step."""
    toys = run.quick or run.device.type == "cpu"
    work = Work("24,000 fp32", [(8000,)] * 3) if toys else Problem(run).work
    for entry in run.each(OPTIMIZERS):
        optimizer = entry.optimizer(work.parameters(run.device), **MOMENTUM.get(entry.name, {}))
        states = len(optimizer.state_names(optimizer.param_groups[0]))
        moved = Work(work.name, work.shapes, work.dtype, 12 + 8 * states, 0)
        about = {"key": entry.name, "work": work.name, "device": run.device.type, "numel": work.numel, "states": states}
        cases = [Case(entry.name, optimizer.step), copy_of_bytes(moved, run.device)]
        for name, timing in run.measure(cases, device=run.device).items():
            yield {**about, "bytes": moved.bytes_each * work.numel, "case": name, "error": None, **timing}
        del optimizer, cases
        run.free()


# --- state in 8 bits


def in_8_bits(run: Run) -> Iterator[Row]:
    """Rows of each place of the state."""
    run.rounds, run.seconds = run.size((20, 1.0), (3, 0.1))
    if run.device.type == "cuda":
        yield from resident(run, Problem(run).work)
        yield from away(run)
    else:
        run.left_out.append("on the device, and away from it: need a GPU")
    toys = Work("24,000 fp32", [(8000,)] * 3)
    yield from resident(run, run.size(Work("16 M fp32", [(1_000_000,)] * 16), toys), torch.device("cpu"))
    yield from in_a_file(run, run.size(Work("67 M fp32", [(4_194_304,)] * 16), toys))


def resident(run: Run, work: Work, device: torch.device | None = None) -> Iterator[Row]:
    """Everyone with all state where the parameters are."""
    device = device or run.device
    makes = {OURS: builds.ours(), **{name: builds.ours(**how) for name, how in INT8.items()}}
    if device.type == "cuda":
        makes |= {name: contenders.CONTENDERS[name].build for name in contenders.installed(run, [RIVAL])}
    loose = Work(work.name, work.shapes, work.dtype, MOVED, 0.1)  # an update from state in 8 bits may be so far off
    cases, errors = checked(run, loose, makes, device)
    cases.append(copy_of_bytes(loose, device))
    about = {"place": "resident", "device": device.type, "work": work.name, "numel": work.numel}
    for name, timing in run.measure(cases, device=device).items():
        each = 28 if name == OURS else MOVED
        yield {**about, "case": name, "bytes": round(each * work.numel), "error": errors.get(name), **timing}


def away(run: Run) -> Iterator[Row]:
    """All state on the host: staged, in place, and what the link can do."""
    problem, work, link = Problem(run), run.size(FULL, QUICK), InPlace.of(run)
    about = {"place": "away", "device": "cuda", "work": work.name, "numel": work.numel, "error": None}
    blocks, _ = link.best_blocks(run)
    plain = run.measure([case for case in link.cases(blocks) if case.name in (BOTH, IN_PLACE)])
    for moves, name in ((BOTH, BOTH_WAYS), (IN_PLACE, IN_PLACE)):
        yield {**about, "case": name, "bytes": sum(MOVES[moves]) * link.nbytes, **plain[moves]}
    del link
    run.free()
    ways: dict[str, dict[str, Any]] = {"staged": {"host_access": "staged"}}
    ways |= {f"in place, {n or 'all'} blocks": {"host_access": "in_place", "blocks": n} for n in (None, 32, 8)}
    for name, how in INT8.items():
        cases = [
            Case(f"{name}, {way}", builds.ours(device_budget=0, **how, **more)(problem.parameters()).step)
            for way, more in ways.items()
        ]
        for case, timing in run.measure(cases).items():
            yield {**about, "case": case, "bytes": 2 * BITS_8 * work.numel, **timing}
        del cases
        run.free()


def in_a_file(run: Run, work: Work) -> Iterator[Row]:
    """All state of a CPU's parameters in a file, whose pages leave the memory as soon as they are done with."""
    about = {"place": "in a file", "device": "cpu", "work": work.name, "numel": work.numel, "error": None}
    cpu, file = torch.device("cpu"), {"placement": "file", "device_budget": 0}
    makes = {name: builds.ours(**file, **how) for name, how in {OURS: {}, **INT8}.items()}
    cases = [Case(name, make(work.parameters(cpu)).step) for name, make in makes.items()]
    for case, timing in run.measure(cases, device=cpu).items():
        nbytes = 2 * (8 if case == OURS else BITS_8) * work.numel
        yield {**about, "case": case, "bytes": round(nbytes), **timing}


# --- what follows


def derive(rows: Rows) -> Rows:
    """GB/s, the share of the rate of the copy that ran in the same rounds, and times against others'.

    Each row is taken by its own clock, since that of the GPU cannot time the many launches of a loop
    (:mod:`experiments.clock`), and by the bytes that it moves itself.
    """
    found = Rows()
    for group in map(on_own_clock, rows.groups("key", "place", "device")):
        copy, mine, fused, rival, plain = (group.first(case=c) for c in (COPY, OURS, FUSED, RIVAL, IN_PLACE))
        in_place = plain and plain["bytes"] / plain["time"]["median"] / 1e3
        for row in group:
            fewer = row.get("key") == BF16 and row["case"] in TORCH
            moved = row["numel"] * TORCH_MOVES if fewer else row["bytes"]
            label = f"{row['case']}, bf16 moments" if fewer else row["case"]
            rate = moved / row["time"]["median"] / 1e3
            # the copy moves as many bytes as 8-bit state: no measure of float32
            share = None if "place" in row and row["case"] == OURS else of_copy(row, copy)
            found.append({
                **row,
                "label": label,
                "name": label if row["clock"] == group[0]["clock"] else f"{label}, {row['clock']}",
                "rate": rate,
                "ms": row["time"]["median"] / 1e3,
                "share": share and share * moved / row["bytes"],
                "share_in_place": 100 * rate / in_place if in_place and "in place" in row["case"] else None,
                "of_ours": over(row["time"], by_clock_of(row, mine)),
                "over_fp32": over(by_clock_of(row, mine), row["time"]),
                "over_fused": over(by_clock_of(row, fused), row["time"]),
                "over_fused_wall": over(fused and fused["wall"], row["wall"]),
                "over_rival": over(rival and rival["wall"], row["wall"]),  # its step waits for the device
            })  # fmt: skip
    return found


def title(rows: Rows) -> str:
    """What is stepped over."""
    return "{work}, {device}: {numel:,} parameters, ".format(**rows[0]) + f"{rows[0]['bytes'] / 1e9:.3g} GB a step"


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    if page.section == "in_8_bits":
        report_8_bits(page, rows)
        return
    if page.section == "every_optimizer":
        steps = Rows(row for row in rows if row["case"] == row["key"])
        columns: dict[str, Column] = {"optimizer": "case", "states": "states", "ms": ms("time")}
        page.table("{work}, {device}", steps, {**columns, "of a copy": percent("share")})
        for row in steps:
            page.bar(f"{row['case']}, share of a copy", Rows([row]), "share", "≥ 90 %")
        return
    first, panels = rows.where(key=rows[0]["key"], device=rows[0]["device"]), bars_of("{work}, {device}", "name")
    page.table(title, first, {"contender": "label", "GPU µs": "gpu", "wall µs": "wall",
        "of the copy": percent("share"), "÷ ours": ratio("of_ours"), "by": "clock", "error": error()})  # fmt: skip
    gpu, cpu = rows.where(device="cuda", case=OURS), rows.where(device="cpu", case=OURS)
    if page.section == "in_16_bits":
        page.picture("in-16-bits", rows, panels,
            "A step of AdamW takes little longer than a copy of its bytes (dashed)")  # fmt: skip
        page.bar("bf16, bf16 state, GPT-2, share of HBM copy", gpu, "share", "≥ 85 %")
        return
    drawn = rows.where(device=rows[0]["device"])
    page.picture("steps", drawn, panels, finding(drawn.where(case=OURS)), by=("work",))
    tiny = "over_fused_wall"
    page.bar("AdamW fp32, GPT-2, speed over torch fused", gpu.where(key="gpt2"), "over_fused", "≥ 1.4 x")
    page.bar("AdamW fp32, GPT-2, share of HBM copy", gpu.where(key="gpt2"), "share", "≥ 93 %")
    page.bar("AdamW fp32, 1 B, share of HBM copy", gpu.where(key="1b"), "share", "≥ 94 %")
    page.bar("1,000 x (2, 3), wall, speed over torch fused", gpu.where(key="1000"), tiny, "≥ 8 x")
    page.bar("5,000 x (2, 3), wall, speed over torch fused", gpu.where(key="5000"), tiny, "≥ 8 x")
    page.bar("bf16, fp32 state, GPT-2, share of HBM copy", gpu.where(key=BF16), "share", "≥ 90 %")
    page.bar("CPU, 5,000 x (2, 3), speed over torch fused", cpu.where(key="5000"), "over_fused", "≥ 5 x")
    page.bar("CPU, 50 M in 12 tensors, speed over torch fused", cpu.where(key="50m"), "over_fused", "≥ 0.95 x")


def finding(ours: Rows) -> str:
    """How many times as fast as torch's fused steps ours are."""
    times = sorted(row["over_fused"] for row in ours if row["over_fused"])
    ends = " to ".join(number(time) for time in dict.fromkeys((times[0], times[-1]))) if times else "-"
    return f"Ours is {ends} times as fast as torch's fused step\ndashed: a copy of its bytes (none over tiny tensors)"


def bars_of(title: str, name: str) -> list[Bars]:
    """A panel of steps, across it their copy."""
    return [Bars(title=title, name=name, length="time", unit="ms", scale=1e3, line=COPY, colors=color)]


def report_8_bits(page: Page, rows: Rows) -> None:
    """A table for each place on a GPU, a picture, and what is held to a limit."""
    columns: dict[str, Column] = {"step": "case", "ms": ms("time"), "of a copy": percent("share"),
        "of the plain kernel": percent("share_in_place"), "bitsandbytes ÷ it (wall)": ratio("over_rival"),
        "float32 ÷ it": ratio("over_fp32"), "error": error()}  # fmt: skip
    first = rows.where(device=rows[0]["device"])
    page.table("on the device, {device}: {work}", first.where(place="resident"), columns)
    away = Rows(row for row in first.where(place="away") if "stochastic" not in row["case"])  # they take as long
    page.table("on the host, {device}: {work}", away, columns)
    page.picture("in-8-bits", rows.where(place="resident", device=rows[0]["device"]),
        bars_of("{work}, {device}", "case"),
        "A step with state in 8 bits is shorter than in float32; dashed: a copy of its bytes",
        by=("place", "device"))  # fmt: skip
    here, away = {"place": "resident", "device": "cuda"}, rows.where(place="away")
    cpu = rows.where(place="resident", device="cpu")
    nearest, in_place = rows.where(case=NEAREST, **here), away.where(case=f"{NEAREST}, in place, all blocks")
    page.bar("resident, nearest, share of a copy", nearest, "share", "≥ 75 %")
    page.bar("resident, stochastic, share of a copy", rows.where(case=STOCHASTIC, **here), "share", "≥ 70 %")
    page.bar("resident, nearest, speed over bitsandbytes", nearest, "over_rival", "≥ 5.5 x")
    page.bar("all away, staged, ms", away.where(case=f"{NEAREST}, staged"), "ms", "≤ 12.5 ms")
    page.bar("all away, in place, of the plain kernel", in_place, "share_in_place", "≥ 75 %")
    page.bar("CPU, nearest, speed over float32", cpu.where(case=NEAREST), "over_fp32", "≥ 0.45 x")
    page.bar("CPU, stochastic, speed over float32", cpu.where(case=STOCHASTIC), "over_fp32", "≥ 0.3 x")
    page.bar("in a file, nearest, speed over float32", rows.where(case=NEAREST, place="in a file"), "over_fp32",
        "≥ 3 x")  # fmt: skip
