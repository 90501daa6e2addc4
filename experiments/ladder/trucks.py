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
from typing import Any

import torch
from torch.optim.adamw import adamw as functional

from experiments.clock import Case
from experiments.columns import mib, ms
from experiments.comparing import on_one_clock
from experiments.lab import Page, Row, Rows, Run, number
from experiments.pictures import Lines
from experiments.works import contenders
from experiments.works.models import FOREACH, FUSED, HYPER, OURS, Step, Work
from experiments.works.weight import extra
from pagedopt import Sweep
from pagedopt.rules.adamw import adamw

MEASURES = ("kernels", "launch", "tables", "transports")
TENSORS = 512
#: torch's allocator takes memory in pieces of up to so many bytes: held to less, it stops what would pass.
SEGMENT = 20 << 20
BETAS = dict(zip(("beta1", "beta2"), HYPER["betas"], strict=True))
GIVEN: dict[str, Any] = {**{name: HYPER[name] for name in ("lr", "eps", "weight_decay")}, **BETAS}
#: Parameters, gradients and both moments, each a list of tensors.
Lists = list[list[torch.Tensor]]


def works(run: Run) -> dict[str, Work]:
    """Small tensors, and large ones: on a CPU of a sixteenth of the size."""
    count = run.size(TENSORS, 8)
    large = run.size(1024 if run.device.type == "cuda" else 256, 64)
    sides = {"trips cost": run.size(64, 16), "bytes cost": large}
    return {name: Work(f"{count} x {n}²", [(n, n)] * count) for name, n in sides.items()}


def lists_of(work: Work, device: torch.device) -> Lists:
    """What AdamW walks over, with moments of zero: for all contenders the same tensors, whose values mean nothing."""
    params = work.parameters(device)
    values, grads = [p.detach() for p in params], [p.grad for p in params if p.grad is not None]
    return [values, grads, *([torch.zeros_like(value) for value in values] for _ in range(2))]


def groups(lists: Lists, size: int) -> list[Lists]:
    """The four lists of each group of so many tensors."""
    return [[x[i : i + size] for x in lists] for i in range(0, len(lists[0]), size)]


def torchs(lists: Lists, size: int, **way: Any) -> Step:
    """A step of torch's AdamW in groups; the fused one counts on the device."""
    where = lists[0][0].device if way.get("fused") else torch.device("cpu")
    counted_groups = [(group, [torch.zeros((), device=where) for _ in group[0]]) for group in groups(lists, size)]

    @torch.no_grad()
    def step() -> None:
        for (params, grads, means, squares), counts in counted_groups:
            functional(params, grads, means, squares, [], counts, amsgrad=False, maximize=False, **GIVEN, **way)

    return step


def ours(lists: Lists, size: int) -> Step:
    """A step of ours in groups, a table and a launch for each."""
    sweeps = [Sweep(adamw, group) for group in groups(lists, size)]
    count = 0.0

    def step() -> None:
        nonlocal count
        count += 1  # other scalars each time, as in any step
        values = [adamw.uniforms({**GIVEN, "step": count})]
        for sweep in sweeps:
            sweep.run(values)

    return step


WAYS: dict[str, Callable[[Lists, int], Step]] = {
    FOREACH: lambda lists, size: torchs(lists, size, foreach=True),
    FUSED: lambda lists, size: torchs(lists, size, fused=True),
    OURS: ours,
}


def measure(run: Run) -> Iterator[Row]:
    """A row per work, rung and b: trips, times (µs), bytes at the peak, whether it passes the bridge."""
    run.rounds, run.seconds = run.size((20, 4.0), (2, 0.05))
    for key, work in run.each(works(run).items()):
        lists, count = lists_of(work, run.device), len(work.shapes)
        sizes = [1 << i for i in range(0, count.bit_length(), run.size(1, 3))]
        for way, make in WAYS.items():
            about = {"key": key, "work": work.name, "device": run.device.type, "numel": work.numel, "way": way}
            with run.attempt(f"{work.name}, {way}", (Exception,)):
                steps = {size: make(lists, size) for size in sizes}
                timings = run.measure([Case(str(size), step) for size, step in steps.items()])
                for size, step in steps.items():
                    row = {**about, "size": size, "trips": -(-count // size), "bridge": 4 * work.numel // 6}
                    yield {**row, **needed(run, row, step), **timings[str(size)]}
                run.say(f"{work.name}, {way}: {len(steps)} trucks")


def needed(run: Run, row: Row, step: Step) -> Row:
    """Bytes at the peak, and whether the step passes under the bridge."""
    found: Row = {"extra": extra(step, run.device)}
    with run.attempt("{work}, {way}, groups of {size}".format(**row)):
        if run.device.type == "cuda":
            found["passes"] = passes(step, row["bridge"], run.device)
    return {"passes": found["extra"] <= row["bridge"], **found}


def passes(step: Step, bridge: int, device: torch.device) -> bool:
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


def derive(rows: Rows) -> Rows:
    """Times of one clock a work; the extra against the group; what passes a bridge too small for the allocator."""
    found = Rows()
    for group in map(on_one_clock, rows.groups("key")):
        count = max(group.values("size"))
        for row in group:
            of_group = row["extra"] / (4 * row["numel"]) * row["trips"]
            passes = row["passes"] if row["bridge"] >= SEGMENT else row["extra"] <= row["bridge"]
            off = {"from_one": abs(of_group - 1), "off": abs(row["trips"] * row["size"] - count)}
            found.append({**row, "passes": passes, **off})
    return found


def largest(rows: Rows, way: str) -> int | None:
    """The largest group that passes the bridge; 0: not even one tensor does; None: the way was not measured."""
    asked = rows.where(key="bytes cost", way=way)
    return max(asked.where(passes=True).values("size"), default=0) if asked else None


def bridge(rows: Rows) -> str | None:
    """Who gets under it with how many tensors."""
    large = rows.where(key="bytes cost")
    if not large:
        return None
    first, count = large[0], max(large.values("size"))
    held = "by an allocator that is held to it" if first["device"] == "cuda" else "by the bytes it asked for"
    found = []
    for way in large.values("way"):
        size = largest(rows, way)
        trips = f"passes with {size} of {count} ({-(-count // size)} trips)" if size else "does not pass"
        found.append(f"{way} {trips}")
    return f"A memory limit of {number(first['bridge'] / 2**20)} MiB over {first['work']}, {held}: {'; '.join(found)}."


class Peaks(Lines):
    """Bytes on an axis that has a place for none at all."""

    def draw(self, axes: Any, rows: Rows) -> None:
        """As lines, from 0 to above the bridge and all others."""
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylim(-0.005, 4 * max(*rows.values("extra"), rows[0]["bridge"]) / 2**20)
        super().draw(axes, rows)

    def labelled(self, clock: str, log: bool = False) -> str:
        """Bytes are by no clock."""
        return f"{self.unit} (log, and 0)"


#: Sizes of a group that the table has; the picture has all.
SHOWN = (1, 8, 64, 512)
GRID: dict[str, Any] = {"down": "way", "across": "size", "corner": "b, tensors in a group"}
DRAWN: dict[str, Any] = {"x": "size", "each": "way", "label": "b, tensors in a group", "colors": contenders.color}
PANELS = [
    Lines(title="{work}: {key}", unit="ms a step", y=ms("time"), inches=4.5, **DRAWN),
    Peaks(
        title="besides parameters, gradients, state",
        unit="MiB at the peak",
        y=mib("extra"),
        log="x",
        level=("memory limit", mib("bridge")),
        **DRAWN,
    ),
]


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, a picture, and what is held to a limit."""
    some = Rows(row for row in rows.where(key="bytes cost") if row["size"] in SHOWN)
    page.grid("{work} on {device} ({key}): MiB at the peak", some, cell=mib("extra"), **GRID)
    page.say(bridge(rows))
    page.picture("trucks", rows, PANELS, "AdamW: larger groups are faster, and cost foreach memory", by=("key",))
    page.bar("trips are 512 / b, off by", rows, "off", "≤ 0")
    page.bar("foreach's extra is one intermediate of its group, off by", rows.where(key="bytes cost", way=FOREACH),
        "from_one", "≤ 0.05")  # fmt: skip
    page.bar("ours in one group, bytes at the peak", rows.where(way=OURS, trips=1), "extra", "≤ 1,048,576 B")
    page.bar("largest group of ours within the memory limit", rows, lambda rows: largest(rows, OURS), f"≥ {TENSORS}")
