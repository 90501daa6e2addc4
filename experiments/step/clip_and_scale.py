"""What do clipping by the global norm and a scaled loss cost, inside of the step and beside it?

Answer (H200, 2026-11, GPU): clip and step over GPT-2 take 1.05 ms in three launches, torch's two 1.51 in 32; a scaled
step takes 1.01 times a plain one.

Everyone steps over parameters of its own, with gradients that stay as they are: the norm to clip to is beyond theirs
and the scale is 1, so what clips and unscales moves its bytes and changes no number, and four updates of each are held
to float64.  Clipping must read gradients twice, so its floor is a copy of 32 bytes a parameter; a scaled step moves no
more than a plain one.  ``scaler.step()`` and ``update()`` have kernels of their own, which look for infinite gradients,
whoever steps; ``with a scale`` is the step alone, that is given a scale and ``found_inf``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from experiments.kept import chosen_device
from experiments.lab import (
    Column,
    Page,
    Row,
    Rows,
    Run,
    by_clock_of,
    formatted,
    on_own_clock,
    over,
    percent,
    ratio,
    spread,
)
from experiments.pictures import BLUE, GRAY, PURPLE, Bars
from experiments.works import contenders
from experiments.works.contenders import COPY, OURS, Build
from experiments.works.dispatch import dispatched
from experiments.works.graph import captured
from experiments.works.models import HYPER, Work, gpt2_shapes
from experiments.works.reference import Bound
from experiments.works.trace import counted, counted_apart
from pagedopt import PagedAdamW

MEASURES = ("kernels", "launch", "tables", "optim")
PLAIN, CLIP, SCALE, BOTH = "a step", "clip and step", "scaler and step", "scaler, clip and step"
#: A norm that no gradient here has.
FAR = 1e6
TORCH, COMPILED, GIVEN = "torch fused", "torch.compile of foreach", f"{OURS} with a scale"
UNSCALED = f"{OURS}, fused=True, no scale"
TORCH_GIVEN, IN_GRAPH, TORCH_GRAPH = "torch fused with a scale", f"{OURS}, captured", "torch fused, captured"
GPT2, TINY = "gpt2", "1000"
Params = list[torch.nn.Parameter]


class Way(NamedTuple):
    """One way to clip, to scale or to do both.

    Attributes:
        what: PLAIN, CLIP, SCALE or BOTH.
        build: of parameters with gradients.
        on_cpu: whether a CPU has it.
        slow: whether a compiler works for seconds.
    """

    what: str
    name: str
    build: Build
    on_cpu: bool = True
    slow: bool = False


def ours(params: Params, **options: Any) -> PagedAdamW:
    return PagedAdamW(params, **HYPER, **options)


def theirs(params: Params, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **HYPER, **options)


def clip(params: Params) -> object:
    """torch's, on a list."""
    return torch.nn.utils.clip_grad_norm_(params, FAR, foreach=True)


def clipping(params: Params, **options: Any) -> Callable[[], None]:
    """torch's clipping and its fused step."""
    optimizer = theirs(params, fused=True, **options)

    def step() -> None:
        clip(params)
        optimizer.step()

    return step


def compiled(params: Params) -> Bound:
    """torch.compile of torch's clipping and its foreach step, as torch's tutorial on compiled optimizers does it."""
    hyper = dict(HYPER)
    if params[0].is_cuda:
        hyper |= {"lr": torch.tensor(hyper["lr"], device=params[0].device), "capturable": True}
    optimizer = torch.optim.AdamW(params, **hyper, foreach=True)

    @torch.compile(fullgraph=False)
    def step() -> None:
        clip(params)
        optimizer.step()

    return Bound(step)


def scaling(params: Params, optimizer: torch.optim.Optimizer, unscaled: bool = False) -> Bound:
    """``scaler.step`` and ``update``; ``unscaled``: behind ``unscale_`` and torch's clipping."""
    scaler = torch.amp.GradScaler(params[0].device.type, init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device=params[0].device))  # makes the tensors of the scale

    def step() -> None:
        if unscaled:
            scaler.unscale_(optimizer)
            clip(params)
        scaler.step(optimizer)
        scaler.update()

    return Bound(step)


def given(params: Params, optimizer: Any) -> Bound:
    """A step that is given a scale of 1, and that no gradient is infinite."""
    device = params[0].device
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    return Bound(optimizer.step)


WAYS = (
    Way(PLAIN, OURS, lambda params: Bound(ours(params).step)),
    Way(PLAIN, TORCH, lambda params: Bound(theirs(params, fused=True).step)),
    Way(CLIP, OURS, lambda params: Bound(ours(params, max_grad_norm=FAR).step)),
    Way(CLIP, TORCH, lambda params: Bound(clipping(params))),
    Way(CLIP, COMPILED, compiled, slow=True),
    Way(CLIP, IN_GRAPH, lambda params: Bound(
        captured(ours(params, max_grad_norm=FAR, capturable=True).step, 2), 2), on_cpu=False),
    Way(CLIP, TORCH_GRAPH, lambda params: Bound(captured(clipping(params, capturable=True), 2), 2), on_cpu=False),
    Way(SCALE, UNSCALED, lambda params: Bound(ours(params, fused=True).step)),
    Way(SCALE, GIVEN, lambda params: given(params, ours(params, fused=True))),
    Way(SCALE, TORCH_GIVEN, lambda params: given(params, theirs(params, fused=True))),
    Way(SCALE, OURS, lambda params: scaling(params, ours(params, fused=True))),
    Way(SCALE, TORCH, lambda params: scaling(params, theirs(params, fused=True))),
    Way(SCALE, "torch foreach, which unscales", lambda params: scaling(params, theirs(params, foreach=True))),
    Way(BOTH, OURS, lambda params: scaling(params, ours(params, fused=True, max_grad_norm=FAR))),
    Way(BOTH, TORCH, lambda params: scaling(params, theirs(params, fused=True), unscaled=True)),
)  # fmt: skip
#: Bytes that a step must move for each float32 parameter; gradients that are clipped are read twice.
BYTES = {PLAIN: 28, CLIP: 32, SCALE: 28, BOTH: 32}


def works(quick: bool) -> dict[str, Work]:
    """What is stepped over."""
    shapes = gpt2_shapes(500, 16, 32, 2) if quick else gpt2_shapes()
    tiny = 20 if quick else 1000
    return {GPT2: Work("GPT-2 124M (148 tensors)", shapes), TINY: Work(f"{tiny:,} x (2, 3)", [(2, 3)] * tiny)}


def options(parser: argparse.ArgumentParser) -> None:
    """What takes long."""
    parser.add_argument("--compile", action="store_true", help="time torch.compile of clipping and foreach step, too")


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way: times (µs), launches and kernels (on a CPU: operators), the update's error."""
    on_cpu = run.device.type == "cpu"
    ways = ways_of(on_cpu, run.options.compile)
    if not run.options.compile:
        run.left_out.append("torch.compile: takes 15 s and more; add --compile")
    asked = [
        (key, dataclasses.replace(work, bytes_each=nbytes), what)
        for key, work in works(run.quick or on_cpu).items()
        for what, nbytes in BYTES.items()
    ]
    timed: list[Row] = []
    for key, work, what in run.each(asked):
        cases, errors = contenders.checked(run, work, builds(ways, what), run.device)
        if key == GPT2:
            cases.append(contenders.copy_of_bytes(work, run.device))
        about = {"key": key, "work": work.name, "what": what, "device": run.device.type, "numel": work.numel}
        for name, timing in run.measure(cases).items():
            row = {**about, "case": name, "bytes": work.bytes_each * work.numel, "error": errors.get(name)}
            timed.append({**row, **timing})
    arguments = str(run.device), run.quick, run.options.compile
    done = counted_apart(run, launches, *arguments, by=("key", "what", "case"))
    yield from ({**row, **done.get((row["key"], row["what"], row["case"]), {})} for row in timed)


def launches(device: str, quick: bool, slow: bool) -> Iterator[Row]:
    """On a GPU in a process of its own: what a step of everybody launches; on a CPU the operators that it calls."""
    run = Run(chosen_device(device), quick)
    on_cpu = run.device.type == "cpu"
    for key, work in works(quick or on_cpu).items():
        for way in ways_of(on_cpu, slow):
            with run.attempt(f"launches of {way.name}: {way.what}, {work.name}", (Exception,)):
                counts = launched(run, way.build(work.parameters(run.device)).step)
                yield {"key": key, "what": way.what, "case": way.name, **counts}


def ways_of(on_cpu: bool, slow: bool) -> list[Way]:
    """Those that are there, and that are not too slow."""
    return [way for way in WAYS if (way.on_cpu or not on_cpu) and (slow or not way.slow)]


def builds(ways: list[Way], what: str) -> dict[str, Build]:
    """By name, what builds those that do it."""
    return {way.name: way.build for way in ways if way.what == what}


def launched(run: Run, step: Callable[[], object]) -> dict[str, int | None]:
    """What one step launches, and the kernels that run; on a CPU the operators of torch that it calls."""
    if run.device.type == "cpu":
        return {"launches": None, "kernels": None, "operators": dispatched(step).total()}
    counts = counted(step)
    return {"launches": counts.launches, "kernels": counts.kernels, "operators": None}


def derive(rows: Rows) -> Rows:
    """Times over a copy of the bytes, over torch's fused step in the same place, and over ours that nobody scales."""
    found = Rows()
    for group in map(on_own_clock, rows.groups("key", "what", "device")):
        copy, fused, unscaled = (group.first(case=case) for case in (COPY, TORCH, UNSCALED))
        for row in group:
            found.append({
                **row,
                "name": f"{row['case']}: {row['what']}",
                "of_copy": over(row["time"], by_clock_of(row, copy)),
                "share": contenders.of_copy(row, copy),
                "of_torch_wall": over(row["wall"], fused and fused["wall"]),
                "of_unscaled": over(row["time"], by_clock_of(row, unscaled)),
            })  # fmt: skip
    return found


def color(name: str) -> str:
    """Ours, torch's, or compiled."""
    return BLUE if name.startswith(OURS) else PURPLE if name.startswith(COMPILED) else GRAY


GPU: dict[str, Any] = {"device": "cuda"}
PANELS = [Bars(title="{work}, {device}", name="name", length="time", unit="ms", scale=1e3, line=COPY, colors=color)]


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    columns: dict[str, Column] = {"who": "case", "launches": "launches", "kernels": "kernels",
        "GPU µs": "gpu", "of the copy": percent("share"),
        "÷ torch fused, wall": formatted("of_torch_wall", "{:.2f}"), "÷ unscaled": ratio("of_unscaled")}  # fmt: skip
    title = "{what}, {work}, {device}"
    page.table("clip and scale: {work}, {device}", rows.where(key=GPT2, device="cuda"), {"what": "what", **columns})
    more: dict[str, Column] = {"host µs": "host", "operators": "operators",
        "wall µs (p10 to p90)": spread("wall"), "by": "clock"}  # fmt: skip
    page.detail.table(title, rows, {**columns, **more}, by=("key", "what", "device"))
    page.picture("steps", rows.where(key=GPT2), PANELS,
        "Clipping and scaling, inside of the step and beside it", by=("work", "device"))  # fmt: skip
    page.bar("GPT-2, clip and step, of a copy of its bytes",
        rows.where(key=GPT2, what=CLIP, case=OURS, **GPU), "of_copy", at_most=1.07, unit="x")  # fmt: skip
    page.bar("GPT-2, clip and step, launches", rows.where(key=GPT2, what=CLIP, case=OURS, **GPU), "launches", at_most=3)
    page.bar("GPT-2, a scaled step's kernels, of an unscaled one's",
        rows.where(key=GPT2, what=SCALE, case=GIVEN, **GPU), "of_unscaled", at_most=1.02, unit="x")  # fmt: skip
    page.bar("1,000 tiny tensors, clip and step, wall, of torch's",
        rows.where(key=TINY, what=CLIP, case=OURS, **GPU), "of_torch_wall", at_most=0.333, unit="x")  # fmt: skip
    page.bar("1,000 tiny tensors, captured, wall, of torch's eager",
        rows.where(key=TINY, what=CLIP, case=IN_GRAPH, **GPU), "of_torch_wall", at_most=0.1, unit="x")  # fmt: skip
