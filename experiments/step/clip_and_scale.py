"""What do a CUDA graph, clipping by the global norm and a scaled loss cost, inside of the step and beside it?

Answer (H200, 2026-11): a captured step over 1,000 small tensors takes 25 µs, where torch's takes 153 µs in a graph and
2.8 ms eagerly.  Clip and step over GPT-2 take 1.05 ms in three launches, torch's two 1.51 in 32; a scaled step takes
1.01 times a plain one (GPU).

Everyone steps over parameters of its own.  A captured step is timed alone, and as the mean of 100 replays that are
queued behind each other; where gradients move, they are two sets that take turns and a replay follows ``refresh()``.
torch's graph cannot follow them.

Clipping and scaling change no number here, and yet read and write all bytes: the norm to clip to is larger than that of
the gradients, and the scale is 1.  So four updates of each can be held to float64.  Clipping must read gradients twice,
so its floor is a copy of 32 bytes a parameter.  ``scaler.step()`` and ``update()`` have kernels of their own,
which look for infinite gradients; ``with a scale`` is the step alone, with ``grad_scale`` and ``found_inf`` set.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from experiments.clock import Case, series
from experiments.columns import formatted, percent, ratio, spread
from experiments.comparing import by_clock_of, on_own_clock, over
from experiments.device import chosen_device
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import Bars, Lines
from experiments.works import builds, contenders
from experiments.works.apart import counted_apart
from experiments.works.builds import graph_of
from experiments.works.dispatch import dispatched
from experiments.works.graph import captured
from experiments.works.models import COMPILED, COPY, FUSED, GRAPH, OURS, Bound, Build, Work, gpt2_shapes
from experiments.works.steps import checked, copy_of_bytes, of_copy
from experiments.works.trace import counted

ANSWERS = {"captured_step": "captured_step", "clip_and_scale": "clip_and_scale"}
NEEDS_GPU = ("captured_step",)
MEASURES = ("kernels", "launch", "tables", "optim")
Params = list[torch.nn.Parameter]


def options(parser: argparse.ArgumentParser) -> None:
    """What takes long."""
    parser.add_argument("--compile", action="store_true", help="time torch.compile of clipping and foreach step, too")


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way: its times (µs), and what it launches."""
    run.rounds, run.seconds = (30, 2.0) if run.part == "captured_step" and not run.quick else (run.rounds, run.seconds)
    yield from replayed(run) if run.part == "captured_step" else clipped(run)


# --- captured

CAPTURED, MOVED = f"{OURS}, captured", f"{OURS}, captured, gradients moved"
QUEUED, IN_GRAPHS, TINY = 100, "GPT-2, 148 tensors", "1,000 x (2, 3)"


def replayed(run: Run) -> Iterator[Row]:
    """Times alone, and the mean of queued replays (wall)."""
    works = {f"{n:,} x (2, 3)": Work("tiny", [(2, 3)] * n) for n in run.size((10, 100, 1000, 5000), (10, 20))}
    works[IN_GRAPHS] = Work("gpt2", run.size(gpt2_shapes(), gpt2_shapes(50, 16, 32, 1)))
    makes: dict[str, Callable[[Params], Any]] = {
        OURS: builds.ours(),
        CAPTURED: lambda params: graph_of(builds.ours(capturable=True)(params).step),
        MOVED: moving,
        FUSED: builds.theirs(fused=True),
        GRAPH: builds.graphed(),
    }
    for name, work in run.each(works.items()):
        steps = {way: build(work.parameters(run.device)).step for way, build in makes.items()}
        for way, timing in run.measure([Case(way, step) for way, step in steps.items()]).items():
            queued = series([mean_of_queued(steps[way]) for _ in range(run.size(9, 1))], "wall")
            yield {"work": name, "tensors": len(work.shapes), "case": way, **timing, "queued": queued}


def moving(params: Params) -> Bound:
    """A replay for gradients that are elsewhere each time."""
    optimizer: Any = builds.ours(capturable=True)(params).optimizer
    replay = captured(optimizer.step)
    first = [p.grad for p in params if p.grad is not None]
    sets = itertools.cycle([first, [grad.clone() for grad in first]])

    def step() -> None:
        for p, grad in zip(params, next(sets), strict=True):
            p.grad = grad
        optimizer.refresh()
        replay()

    return Bound(step)


def mean_of_queued(step: Callable[[], Any]) -> float:
    """Microseconds of a step, of as many as are queued behind each other."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(QUEUED):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / QUEUED


# --- clipped and scaled

PLAIN, CLIP, SCALE, BOTH = "a step", "clip and step", "scaler and step", "scaler, clip and step"
#: A norm that no gradient here has.
FAR = 1e6
TORCH_GIVEN, IN_GRAPH, TORCH_GRAPH = "torch fused with a scale", f"{OURS}, captured", "torch fused, captured"
UNSCALED, GIVEN = f"{OURS}, fused=True, no scale", f"{OURS} with a scale"
#: Bytes that a step must move for each float32 parameter; gradients that are clipped are read twice.
BYTES = {PLAIN: 28, CLIP: 32, SCALE: 28, BOTH: 32}


class Way(NamedTuple):
    """One way to clip, to scale or to do both (``what``), of parameters with gradients.

    Attributes:
        on_cpu: whether a CPU has it.
        slow: whether a compiler works for seconds.
    """

    what: str
    name: str
    build: Build
    on_cpu: bool = True
    slow: bool = False


def clip(params: Params) -> object:
    """torch's, on a list."""
    return torch.nn.utils.clip_grad_norm_(params, FAR, foreach=True)


def clipping(make: Build, wrap: Callable[[Any], Any] = lambda step: step) -> Build:
    """torch's clipping in front of a step, both wrapped."""

    def build(params: Params) -> Bound:
        step = make(params).step

        def both() -> None:
            clip(params)
            step()

        return Bound(wrap(both))

    return build


def scaling(make: Build, unscaled: bool = False) -> Build:
    """``scaler.step`` and ``update``; ``unscaled``: behind ``unscale_`` and torch's clipping."""

    def build(params: Params) -> Bound:
        optimizer: Any = make(params).optimizer
        scaler = torch.amp.GradScaler(params[0].device.type, init_scale=1.0, growth_interval=1 << 30)
        scaler.scale(torch.ones((), device=params[0].device))  # makes the tensors of the scale

        def step() -> None:
            if unscaled:
                scaler.unscale_(optimizer)
                clip(params)
            scaler.step(optimizer)
            scaler.update()

        return Bound(step)

    return build


def given(make: Build) -> Build:
    """A step that is given a scale of 1, and that no gradient is infinite."""

    def build(params: Params) -> Bound:
        optimizer: Any = make(params).optimizer
        device = params[0].device
        optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), torch.zeros((), device=device)
        return Bound(optimizer.step)

    return build


ours, theirs = builds.ours, builds.theirs
MINE, TORCHS = ours(fused=True), theirs(fused=True)
WAYS = (
    Way(PLAIN, OURS, ours()),
    Way(PLAIN, FUSED, TORCHS),
    Way(CLIP, OURS, ours(max_grad_norm=FAR)),
    Way(CLIP, FUSED, clipping(TORCHS)),
    Way(CLIP, COMPILED, builds.compiled(before=clip), slow=True),
    Way(CLIP, IN_GRAPH, lambda p: graph_of(ours(max_grad_norm=FAR, capturable=True)(p).step), on_cpu=False),
    Way(CLIP, TORCH_GRAPH, lambda p: graph_of(clipping(theirs(fused=True, capturable=True))(p).step), on_cpu=False),
    Way(SCALE, UNSCALED, MINE),
    Way(SCALE, GIVEN, given(MINE)),
    Way(SCALE, TORCH_GIVEN, given(TORCHS)),
    Way(SCALE, OURS, scaling(MINE)),
    Way(SCALE, FUSED, scaling(TORCHS)),
    Way(SCALE, "torch foreach, which unscales", scaling(theirs(foreach=True))),
    Way(BOTH, OURS, scaling(ours(fused=True, max_grad_norm=FAR))),
    Way(BOTH, FUSED, scaling(TORCHS, unscaled=True)),
)


def asked(run: Run, slow: bool) -> Iterator[tuple[str, Work, str, list[Way]]]:
    """Key, work, what is done, and the ways to do it on this device; compiled ones if ``slow``."""
    on_cpu = run.device.type == "cpu"
    small = run.quick or on_cpu
    shapes, tiny = gpt2_shapes(500, 16, 32, 2) if small else gpt2_shapes(), 20 if small else 1000
    works = {"gpt2": Work("GPT-2 124M (148 tensors)", shapes), "1000": Work(f"{tiny:,} x (2, 3)", [(2, 3)] * tiny)}
    ways = [way for way in WAYS if (way.on_cpu or not on_cpu) and (slow or not way.slow)]
    for key, work in works.items():
        for what, nbytes in BYTES.items():
            yield key, dataclasses.replace(work, bytes_each=nbytes), what, [way for way in ways if way.what == what]


def clipped(run: Run) -> Iterator[Row]:
    """Times, launches and kernels (on a CPU: operators), and the update's error."""
    if not run.options.compile:
        run.left_out.append("torch.compile: takes 15 s and more; add --compile")
    timed: list[Row] = []
    for key, work, what, ways in run.each(list(asked(run, run.options.compile))):
        cases, errors = checked(run, work, {way.name: way.build for way in ways}, run.device)
        if key == "gpt2":
            cases.append(copy_of_bytes(work, run.device))
        about = {"key": key, "work": work.name, "what": what, "device": run.device.type, "numel": work.numel}
        for name, timing in run.measure(cases).items():
            row = {**about, "case": name, "bytes": work.bytes_each * work.numel, "error": errors.get(name)}
            timed.append({**row, **timing})
    done = counted_apart(run, launches, str(run.device), run.quick, run.options.compile, by=("key", "what", "case"))
    yield from ({**row, **done.get((row["key"], row["what"], row["case"]), {})} for row in timed)


def launches(device: str, quick: bool, slow: bool) -> Iterator[Row]:
    """On a GPU in a process of its own: what a step of everybody launches; on a CPU the operators that it calls."""
    run = Run(chosen_device(device), quick)
    for key, work, what, ways in asked(run, slow):
        for way in ways:
            with run.attempt(f"launches of {way.name}: {what}, {work.name}", (Exception,)):
                step = way.build(work.parameters(run.device)).step
                if run.device.type == "cpu":
                    counts = {"launches": None, "kernels": None, "operators": dispatched(step).total()}
                else:
                    found = counted(step)
                    counts = {"launches": found.launches, "kernels": found.kernels, "operators": None}
                yield {"key": key, "what": what, "case": way.name, **counts}


# --- what follows


def derive(rows: Rows) -> Rows:
    """Ratios of captured steps, and of clipped and scaled ones.

    Captured: over torch's fused step and its graph, by the wall; queued, over 1.05 times the kernel's time and 15 µs.
    Clipped and scaled: over a copy of the bytes, over torch's fused step that does the same, over our unscaled step.
    """
    found = Rows()
    for row in rows.where(key=None):  # captured steps have no key
        ours, fused, graph = (rows.first(work=row["work"], case=case) or {} for case in (OURS, FUSED, GRAPH))
        kernel = ours.get("gpu") and {"clock": "wall", "median": 1.05 * ours["gpu"]["median"] + 15}
        ratios = {
            "of_fused": over(fused.get("wall"), row["wall"]), "of_graph": over(row["wall"], graph.get("wall")),
            "queued_of_graph": over(row["queued"], graph.get("queued")), "of_kernel": over(row["queued"], kernel),
        }  # fmt: skip
        found.append({**row, "clock": "wall", "tiny": row["work"] != IN_GRAPHS, **ratios})
    clips = Rows(row for row in rows if "key" in row)
    for group in map(on_own_clock, clips.groups("key", "what", "device")):
        copy, torchs, unscaled = (group.first(case=case) for case in (COPY, FUSED, UNSCALED))
        for row in group:
            found.append({
                **row,
                "of_copy": over(row["time"], by_clock_of(row, copy)),
                "share": of_copy(row, copy),
                "of_torch_wall": over(row["wall"], torchs and torchs["wall"]),
                "of_unscaled": over(row["time"], by_clock_of(row, unscaled)),
            })  # fmt: skip
    return found


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    if page.section == "captured_step":
        report_captured(page, rows)
        return
    first, gpu = rows.where(key="gpt2"), rows.where(device="cuda")
    page.table("clip and scale: {work}, {device}", first, {"what": "what", "who": "case", "launches": "launches",
        "operators": "operators", "GPU µs": "gpu", "of the copy": percent("share"),
        "÷ torch fused, wall": formatted("of_torch_wall", "{:.2f}"), "÷ unscaled": ratio("of_unscaled")})  # fmt: skip
    page.picture("steps", first, [Bars(title="{what}", name="case", length="time", unit="ms", scale=1e3,
        line=COPY, colors=contenders.color)],
        "{work}: clipping and scaling take less within the step; dashed: a copy", by=("what",))  # fmt: skip
    large, small = gpu.where(key="gpt2", what=CLIP, case=OURS), gpu.where(key="1000", what=CLIP)
    scaled = gpu.where(key="gpt2", what=SCALE, case=GIVEN)
    page.bar("GPT-2, clip and step, of a copy of its bytes", large, "of_copy", "≤ 1.07 x")
    page.bar("GPT-2, clip and step, launches", large, "launches", "≤ 3")
    page.bar("GPT-2, a scaled step's kernels, of an unscaled one's", scaled, "of_unscaled", "≤ 1.02 x")
    page.bar("1,000 tiny tensors, clip and step, wall, of torch's", small.where(case=OURS), "of_torch_wall",
        "≤ 0.333 x")  # fmt: skip
    page.bar("1,000 tiny tensors, captured, wall, of torch's eager", small.where(case=IN_GRAPH), "of_torch_wall",
        "≤ 0.1 x")  # fmt: skip


def report_captured(page: Page, rows: Rows) -> None:
    """A table of GPT-2, a picture of tiny tensors, and what is held to a limit."""
    page.table("{work}", rows.where(work=IN_GRAPHS), {"step": "case", "host µs": "host", "GPU µs": "gpu",
        "wall µs (p10 to p90)": spread("wall"), f"wall µs of {QUEUED} queued, each": "queued",
        "torch fused ÷ it": formatted("of_fused", "{:.1f} x")})  # fmt: skip
    page.picture("steps", rows, [Lines(title="a step of tensors of 2 x 3", x="tensors", y="wall",
        each="case", label="tensors", colors=contenders.color, where={"tiny": True})],
        "Captured, a step of small tensors hardly grows with their number")  # fmt: skip
    large, tiny = (rows.where(work=work, case=CAPTURED) for work in (IN_GRAPHS, TINY))
    page.bar("GPT-2, queued, over 1.05 x the kernel + 15 µs", large, "of_kernel", "≤ 1 x")
    page.bar("GPT-2, queued, over torch fused in a graph", large, "queued_of_graph", "≤ 1 x")
    page.bar("1,000 tiny tensors, torch fused eager ÷ it", tiny, "of_fused", "≥ 20 x")
    page.bar("1,000 tiny tensors, over torch fused in a graph", tiny, "of_graph", "≤ 1 x")
