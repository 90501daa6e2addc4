"""How large may the truck be: what does a step in groups of b tensors take in time, and in memory at its peak?

Answer (H200, 2026-11): as large as the memory allows; foreach's needs one intermediate as large as its group, so only
an eighth of it passes under the bridge, where fused and a pointer list need nothing and pass as one.

512 tensors, AdamW, updated in groups of b = 1, 2, 4 … 512: 512 / b trips, as the lecture's 512 cars in trucks of 8 take
64.  Twice: tensors of 64² (trips cost) and of 1024² (bytes cost).  The bridge is a cap on memory besides parameters,
gradients and state, a sixth of the parameters' bytes: on a GPU torch's allocator is held to it, and the largest b that
passes is what remains.  Groups are slices of the lists, handed to torch's functional AdamW (foreach, fused) and to a
table each of ours, with PagedAdamW's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw as functional

from experiments.harness.child import only
from experiments.harness.columns import mib, on_one_clock
from experiments.harness.plot import BLUE, GRAY, GREEN, LETTERS, PAGE, RED, Plot, label_beside
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table, Text, number
from experiments.harness.time import Case
from experiments.works.contenders import FOREACH, FUSED, OURS
from experiments.works.models import HYPER, Work
from experiments.works.trace import counted
from experiments.works.weight import Scales, extra, high_water
from pagedopt import Sweep
from pagedopt.rules.adamw import adamw

TENSORS, TOYS = 512, 8
#: The parameters' bytes through this is the bridge.
SIXTH = 6
#: torch's allocator takes memory in pieces of up to so many bytes: held to less, it stops what would pass.
SEGMENT = 20 << 20
GIVEN: dict[str, Any] = {
    "beta1": HYPER["betas"][0], "beta2": HYPER["betas"][1], "lr": HYPER["lr"], "eps": HYPER["eps"],
    "weight_decay": HYPER["weight_decay"],
}  # fmt: skip


def works(run: Run) -> dict[str, Work]:
    """Small tensors, and large ones: on a CPU of a sixteenth of the size."""
    count = run.size(TENSORS, TOYS)
    large = run.size(1024 if run.device.type == "cuda" else 256, 64)
    sides = {"trips cost": run.size(64, 16), "bytes cost": large}
    return {name: Work(f"{count} x {n}²", [(n, n)] * count, torch.float32, 28, 0) for name, n in sides.items()}


@dataclass
class Lists:
    """What AdamW walks over: all contenders the same tensors, whose values mean nothing."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    means: list[torch.Tensor]
    squares: list[torch.Tensor]

    @classmethod
    def of(cls, work: Work, device: torch.device) -> Lists:
        """With moments of zero."""
        found = work.parameters(device)
        values = [p.detach() for p in found]
        moments = [[torch.zeros_like(v) for v in values] for _ in range(2)]
        return cls(values, [p.grad for p in found if p.grad is not None], *moments)

    def groups(self, size: int) -> list[list[list[torch.Tensor]]]:
        """The four lists of each group of so many tensors."""
        lists = (self.params, self.grads, self.means, self.squares)
        return [[list(x[i : i + size]) for x in lists] for i in range(0, len(self.params), size)]


def torchs(lists: Lists, size: int, **way: Any) -> Callable[[], None]:
    """A step of torch's AdamW in groups; the fused one counts on the device."""
    where = lists.params[0].device if way.get("fused") else torch.device("cpu")
    groups = [(g, [torch.zeros((), device=where) for _ in g[0]]) for g in lists.groups(size)]

    def step() -> None:
        with torch.no_grad():
            for (params, grads, means, squares), counts in groups:
                functional(params, grads, means, squares, [], counts, amsgrad=False, maximize=False, **GIVEN, **way)

    return step


def ours(lists: Lists, size: int) -> Callable[[], None]:
    """A step of ours in groups, a table and a launch for each."""
    sweeps = [Sweep(adamw, group) for group in lists.groups(size)]
    count = 0.0

    def step() -> None:
        nonlocal count
        count += 1  # other scalars each time, as in any step
        values = [adamw.uniforms({**GIVEN, "step": count})]
        for sweep in sweeps:
            sweep.run(values)

    return step


WAYS: dict[str, Callable[[Lists, int], Callable[[], None]]] = {
    FOREACH: lambda lists, size: torchs(lists, size, foreach=True),
    FUSED: lambda lists, size: torchs(lists, size, fused=True),
    OURS: ours,
}


def measure(run: Run) -> Iterator[Row]:
    """A row per work, rung and b: trips, times (µs), bytes at the peak, kernels, whether it passes the bridge."""
    run.rounds, run.seconds = run.size((20, 4.0), (2, 0.05))
    for key, work in run.each(works(run).items()):
        lists = Lists.of(work, run.device)
        sizes = [1 << i for i in range(0, len(work.shapes).bit_length(), run.size(1, 3))]
        for way, make in WAYS.items():
            with run.attempt(f"{work.name}, {way}", (Exception,)):
                steps = {size: make(lists, size) for size in sizes}
                timings = run.measure([Case(str(size), step) for size, step in steps.items()])
                for size, step in steps.items():
                    about = {"key": key, "work": work.name, "device": run.device.type, "numel": work.numel, "way": way}
                    trips = {"size": size, "trips": -(-len(work.shapes) // size)}
                    yield {**about, **trips, **needed(run, key, work, way, size, step), **timings[str(size)]}
                run.say(f"{work.name}, {way}: {len(steps)} trucks")


def needed(run: Run, key: str, work: Work, way: str, size: int, step: Callable[[], None]) -> Row:
    """Bytes at the peak by all witnesses, kernels, and whether the step passes under the bridge."""
    scales = Scales(run.device)
    bridge = 4 * work.numel // SIXTH
    found: Row = {"extra": extra(step, run.device), "bridge": bridge, "kernels": None, "busy": None, "resident": None}
    if run.device.type == "cpu":
        if not run.quick:
            try:
                found |= only(resident, key, way, size, limit=120)
            except RuntimeError as error:
                run.leave_out(f"{work.name}, {way}, groups of {size}: {error}")
        return {**found, "others": 0, "passes": found["extra"] <= bridge}
    found |= {"others": scales.others(), "passes": passes(step, bridge, run.device)}
    try:
        counts = counted(step, warmup=0)
        found |= {"kernels": counts.kernels, "busy": counts.busy_us}
    except RuntimeError as error:  # a trace that is not whole, or none
        run.leave_out(f"{work.name}, {way}, groups of {size}: {error}")
    return found


def passes(step: Callable[[], None], bridge: int, device: torch.device) -> bool:
    """Whether a step runs where torch's allocator may take so much more than it holds."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + bridge) / total, device)
    try:
        step()
        torch.cuda.synchronize(device)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def resident(key: str, way: str, size: int) -> Iterator[dict[str, Any]]:
    """In a process of its own: by how much a step raises what the process has in RAM at its peak."""
    from experiments.harness.show import console

    run = Run(torch.device("cpu"), False, console())
    step = WAYS[way](Lists.of(works(run)[key], run.device), size)
    step()
    before = high_water(reset=True)
    step()
    after = high_water()
    yield {"resident": None if before is None or after is None else after - before}


def derive(rows: Rows) -> Rows:
    """The extra against parameters and group, and a small bridge; times, of one clock a work, against those of our
    largest truck."""
    found = Rows()
    for group in map(on_one_clock, rows.groups("key")):
        best = group.number("time", way=OURS, size=max(group.values("size")))
        for row in group:
            share = row["extra"] / (4 * row["numel"])
            found.append({
                **row, "passes": row["passes"] if row["bridge"] >= SEGMENT else row["extra"] <= row["bridge"],
                "share": share, "of_group": share * row["trips"],
                "of_ours": row["time"] / best if best else None,
                "off": abs(row["trips"] * row["size"] - group[-1]["size"]),
            })  # fmt: skip
    return found


def largest(rows: Rows, way: str) -> int | None:
    """The largest group that passes the bridge."""
    return max((row["size"] for row in rows.where(key="bytes cost", way=way, passes=True)), default=None)


def bridge(rows: Rows) -> str | None:
    """Who gets under it with how many tensors."""
    large = rows.where(key="bytes cost")
    if not large:
        return None
    cap, count = number(large[0]["bridge"] / 2**20), max(large.values("size"))
    found = []
    for way in large.values("way"):
        size = largest(rows, way)
        trips = "does not pass" if size is None else f"passes with {size} of {count} ({-(-count // size)} trips)"
        found.append(f"{way} {trips}")
    held = "by an allocator that is held to it" if large[0]["device"] == "cuda" else "by the bytes it asked for"
    return f"The bridge of {cap} MiB over {large[0]['work']}, {held}: " + "; ".join(found) + "."


def of_ours_at_full(rows: Rows) -> float | None:
    """What ours takes with all tensors in one truck."""
    count = max(rows.values("size"))
    return max((row["extra"] for row in rows.where(way=OURS, size=count)), default=None)


def far_from_one(rows: Rows) -> float | None:
    """How far foreach's extra is from one intermediate as large as the group, in the work whose bytes count."""
    known = [abs(row["of_group"] - 1) for row in rows.where(key="bytes cost", way=FOREACH)]
    return max(known, default=None)


COLORS = {FOREACH: GRAY, FUSED: GREEN, OURS: BLUE}


def draw(figure: Any, rows: Rows) -> None:
    """Per work: time against b, and below it the bytes at the peak, with the bridge."""
    figure.set_size_inches(PAGE, 9)
    groups = list(rows.groups("key"))
    places = figure.subplots(len(groups), 2, squeeze=False, sharex=True)
    for line, group in zip(places, groups, strict=True):
        ends: tuple[list[Any], list[Any]] = ([], [])
        for way in group.values("way"):
            of = sorted(group.where(way=way), key=lambda row: row["size"])
            across, color = [row["size"] for row in of], COLORS[way]
            for axes, end, up in zip(
                line, ends, ([row["time"] / 1e3 for row in of], [row["extra"] / 2**20 for row in of]), strict=True
            ):
                axes.plot(across, up, color=color, marker="o" if way == OURS else "s", markersize=4)
                end.append((across[-1], up[-1], way, color))
        line[1].axhline(group[0]["bridge"] / 2**20, color=RED, linestyle="--")
        ends[1].append((max(group.values("size")), group[0]["bridge"] / 2**20, "bridge", RED))
        line[0].set(
            xscale="log",
            yscale="log",
            ylabel=f"ms a step, {group[0]['clock']} (log)",
            title=f"{group[0]['work']}: {group[0]['key']}",
        )
        line[1].set_xscale("log")
        line[1].set_yscale("symlog", linthresh=0.01)
        line[1].set_ylim(-0.005, 4 * max(end[1] for end in ends[1]))
        line[1].set(ylabel="MiB at the peak (log, and 0)", title="besides parameters, gradients, state")
        for axes, end in zip(line, ends, strict=True):
            label_beside(axes, end)
    for axes in places.flat:
        axes.grid(alpha=0.3)
        axes.set_xlabel("b, tensors in a truck (log)")
        axes.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"], minor=False)
        axes.title.set_fontsize(LETTERS + 1)


TABLES = [
    Table("{work} on {device} ({key}), {way}", by=("key", "way"), columns={
        "b": "size", "trips": "trips", "host µs": "host", "GPU µs": "gpu", "wall µs": "wall", "busy µs": "busy",
        "kernels": "kernels", "MiB at the peak": mib("extra"), "of the group": "of_group",
        "not torch's, MiB": mib("others"), "in RAM, MiB": mib("resident"),
        "passes": lambda row: "yes" if row["passes"] else "no",
    })
]  # fmt: skip
BARS = [
    Bar("trips are 512 / b, off by", "off", at_most=0),
    Bar("foreach's extra is one intermediate of its group, off by", far_from_one, at_most=0.05),
    Bar("ours in one truck, bytes at the peak", of_ours_at_full, at_most=1 << 20, unit="B"),
    Bar("largest truck of ours under the bridge", lambda rows: largest(rows, OURS), at_least=TENSORS),
]
TEXTS = [Text("trucks", bridge)]
PLOTS = [Plot("trucks", draw)]
