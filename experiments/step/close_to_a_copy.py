"""How close is one step of PagedAdamW to a copy of its bytes, and how far from torch's own steps?

Answer (H200, 2026-11): 95 % of a copy at 124 M parameters, 96 % at 1 B, where torch's fused step has 81 %; with 1,000
tiny tensors the GPU needs 10 µs where torch fused needs 168, and the rest is Python.

All contenders of a work step in interleaved rounds, each over its own copy of the same random parameters, after four of
its updates were held to float64.  The reference is a copy that reads and writes as many bytes as our update must: 28
per float32 parameter (parameter, gradient and two moments read, all but the gradient written).  The share of a
contender that moves fewer bytes is that of its own bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from experiments.lab import Column, Page, Row, Rows, Run, by_clock_of, error, on_own_clock, over, percent, ratio, spread
from experiments.pictures import Bars
from experiments.works import contenders
from experiments.works.contenders import COMPILED, COPY, FOREACH, FUSED, GRAPH, LOOP, OURS, color
from experiments.works.models import Work, gpt2_shapes

MEASURES = ("kernels", "launch", "tables", "optim")
TORCH = (FUSED, FOREACH, LOOP, GRAPH)
OTHERS = ("bitsandbytes AdamW32bit", "bitsandbytes PagedAdamW32bit", "torchao AdamW8bit")
#: Work → who steps over it on the GPU, and on the CPU.
ON_GPU = {
    "gpt2": (OURS, f"{OURS}, managed state", *TORCH, COMPILED, *OTHERS),
    "gpt2-bf16": (OURS, *TORCH),
    "1b": (OURS, FUSED, FOREACH),
    "1000": (OURS, *TORCH, *OTHERS),
    "5000": (OURS, FUSED, FOREACH, GRAPH),
}
#: Bytes that torch's steps move for each bf16 parameter: their moments are bf16, ours float32.
BF16, TORCH_MOVES = "gpt2-bf16", 14
ON_CPU = dict.fromkeys(("5000", "50m"), (OURS, FUSED, FOREACH))


def works(quick: bool) -> dict[str, Work]:
    """What is stepped over."""
    gpt2 = gpt2_shapes(500, 16, 32, 2) if quick else gpt2_shapes()
    billion = [(64, 64)] * 2 if quick else [(4096, 4096)] * 60
    fifty = [(1000,)] * 12 if quick else [(4_166_667,)] * 12
    some, many = (20, 100) if quick else (1000, 5000)
    # bf16: parameters and gradients are rounded to 8 bits, an update of 1e-3 is a few units of a parameter of 0.02.
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
    cpu = torch.device("cpu")
    cuda = run.device.type == "cuda"
    stepped = [(key, names, run.device) for key, names in ON_GPU.items() if cuda]
    stepped += [(key, names, cpu) for key, names in ON_CPU.items()]
    if not cuda:
        run.left_out.append("the GPU's bars: need a GPU")
    if not run.options.compile:
        run.left_out.append("torch.compile: takes 15 s and more; add --compile")
    known = works(run.quick)
    for key, names, device in run.each(stepped):
        if not run.options.compile:
            names = tuple(name for name in names if name != COMPILED)
        yield from steps(run, key, known[key], names, device)


def steps(run: Run, key: str, work: Work, names: tuple[str, ...], device: torch.device) -> Iterator[Row]:
    """Check and time everyone over one work; nothing if it does not fit."""
    builds = {name: contenders.CONTENDERS[name].build for name in contenders.installed(run, names)}
    if key == BF16:
        builds[OURS] = contenders.ours(state_format="float32")
    needed = work.numel * (8 + 16 * len(builds) + 32)
    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
        run.leave_out(f"{work.name}: needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return
    cases, errors = contenders.checked(run, work, builds, device)
    if len(work.shapes) < 1000:
        cases.append(contenders.copy_of_bytes(work, device))
    about = {"key": key, "work": work.name, "device": device.type, "numel": work.numel}
    for name, timing in run.measure(cases, device=device).items():
        yield {**about, "bytes": work.bytes_each * work.numel, "case": name, "error": errors.get(name), **timing}
    run.say(f"{work.name} on {device.type}: {len(cases)} cases")


def derive(rows: Rows) -> Rows:
    """GB/s, the share of the rate of the copy that ran in the same rounds, and times against ours and torch fused: each
    row's by its own clock, as a gate cannot hold the many launches of a loop, and of the bytes that it moves itself."""
    found = Rows()
    for group in map(on_own_clock, rows.groups("key", "device")):
        copy, mine, fused = (group.first(case=case) for case in (COPY, OURS, FUSED))
        for row in group:
            fewer = row["key"] == BF16 and row["case"] in TORCH
            moved = row["numel"] * TORCH_MOVES if fewer else row["bytes"]
            label = f"{row['case']}, bf16 moments" if fewer else row["case"]
            share = contenders.of_copy(row, copy)
            found.append({
                **row,
                "label": label,
                "name": label if row["clock"] == group[0]["clock"] else f"{label}, {row['clock']}",
                "rate": moved / row["time"]["median"] / 1e3,
                "share": share and share * moved / row["bytes"],
                "of_ours": over(row["time"], by_clock_of(row, mine)),
                "over_fused": over(by_clock_of(row, fused), row["time"]),
                "over_fused_wall": over(fused and fused["wall"], row["wall"]),
            })  # fmt: skip
    return found


def title(rows: Rows) -> str:
    """What is stepped over."""
    return "{work}, {device}: {numel:,} parameters, ".format(**rows[0]) + f"{rows[0]['bytes'] / 1e9:.3g} GB a step"


GPU: dict[str, Any] = {"device": "cuda", "case": OURS}
CPU: dict[str, Any] = {"device": "cpu", "case": OURS}
TINY = "over_fused_wall"
PANELS = [Bars(title="{work}, {device}", name="name", length="time", unit="ms", scale=1e3, line=COPY, colors=color)]
TITLE = "A step of AdamW; dashed: a copy of the bytes that ours moves (none over tiny tensors)"


def shown(page: Page, rows: Rows) -> None:
    """A table of the first work, and of each other in detail."""
    columns: dict[str, Column] = {"contender": "label", "GPU µs": "gpu", "wall µs": "wall",
        "of the copy": percent("share"), "÷ ours": ratio("of_ours"), "by": "clock", "error": error()}  # fmt: skip
    more: dict[str, Column] = {"host µs": "host", "wall µs (p10 to p90)": spread("wall")}
    first = rows.where(key=rows[0]["key"], device=rows[0]["device"])
    page.table(title, first, columns)
    page.detail.table(title, rows, {**columns, **more}, by=("key", "device"))


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    shown(page, rows)
    page.picture("steps", rows.where(device=rows[0]["device"]), PANELS, TITLE, by=("work",))
    page.bar("AdamW fp32, GPT-2, speed over torch fused", rows.where(key="gpt2", **GPU), "over_fused",
        at_least=1.4, unit="x")  # fmt: skip
    page.bar("AdamW fp32, GPT-2, share of HBM copy", rows.where(key="gpt2", **GPU), "share", at_least=93, unit="%")
    page.bar("AdamW fp32, 1 B, share of HBM copy", rows.where(key="1b", **GPU), "share", at_least=94, unit="%")
    page.bar("1,000 x (2, 3), wall, speed over torch fused", rows.where(key="1000", **GPU), TINY, at_least=8, unit="x")
    page.bar("5,000 x (2, 3), wall, speed over torch fused", rows.where(key="5000", **GPU), TINY, at_least=8, unit="x")
    page.bar("bf16, fp32 state, GPT-2, share of HBM copy", rows.where(key="gpt2-bf16", **GPU), "share",
        at_least=90, unit="%")  # fmt: skip
    page.bar("CPU, 5,000 x (2, 3), speed over torch fused", rows.where(key="5000", **CPU), "over_fused",
        at_least=5, unit="x")  # fmt: skip
    page.bar("CPU, 50 M in 12 tensors, speed over torch fused", rows.where(key="50m", **CPU), "over_fused",
        at_least=0.95, unit="x")  # fmt: skip
