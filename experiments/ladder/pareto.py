"""What does each optimizer take in time, and what does it need in memory, over the same parameters?

Answer (H200, 2026-11): for a layer of a Llama 70B ours takes 90 % of the rate of a copy, torch fused 79 %, in the same
memory; below that state goes to 16 bits or to the host.  Over many small tensors a CUDA graph's host is faster.

AdamW on every rung and of every package, with our state wherever it may lie and in every format.  Contenders come one
after the other, each alone over the same parameters, so that what memory it takes is its own: bytes of state, and bytes
at the peak of a step beyond it, as torch's allocator is asked for them, and what else of the device is gone.  A copy of
the bytes of a float32 update runs in interleaved rounds with each, and is scaled to what an update with that state must
move.  Times of one work are by one clock.  Four updates are held to float64 first: *exact* are those that are off by no
more than 5e-4 of themselves, as float32 in another order is (decay after the update: 1e-4), and narrower state is not
(bfloat16: 7e-4).  Whoever is on the front is not beaten in both by anyone else.  What is compiled, torchao's step among
it, runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from experiments.harness.columns import by, mib, ms, on_one_clock
from experiments.harness.machine import chosen_device
from experiments.harness.plot import BLUE, GRAY, ORANGE, PAGE, PURPLE, RED, Plot, label_beside
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table, console
from experiments.harness.time import Case
from experiments.works.contenders import (
    COMPILED,
    COMPILED_LOOP,
    CONTENDERS,
    COPY,
    FOREACH,
    FUSED,
    GRAPH,
    LIMIT,
    LOOP,
    OURS,
    TORCHAO,
    TRITON,
    Build,
    copy_of_bytes,
    installed,
    ours,
)  # fmt: skip
from experiments.works.fresh import fresh
from experiments.works.models import LLAMA_LAYER, Work, gpt2_shapes
from experiments.works.reference import Reference, Step
from experiments.works.trace import counted
from experiments.works.weight import Scales, extra
from pagedopt import PagedOptimizer
from pagedopt.formats import FORMATS

SHARES = ("75%", "50%", "25%", "0%")
#: Ours with its state elsewhere, or in other formats: all there are.
OF_OURS: dict[str, Build] = {
    **{f"{OURS}, {share} on device": ours(device_budget=share) for share in SHARES},
    **{f"{OURS}, {name} state": ours(state_format=name) for name in FORMATS if name != "float32"},
}
BITS_8 = "bitsandbytes AdamW8bit"
OTHERS = ("bitsandbytes AdamW32bit", BITS_8, "apex FusedAdam", TRITON)
#: Whose state is narrow where a tensor has so many elements, and float32 elsewhere.
QUANTIZED, QUANTIZED_FROM = (BITS_8, *TORCHAO), 4096
ON_GPU = (LOOP, FOREACH, FUSED, GRAPH, *OTHERS, f"{OURS}, device", *OF_OURS)
ON_CPU = (LOOP, FOREACH, FUSED, f"{OURS}, device", *OF_OURS)
TOYS = (FOREACH, FUSED, f"{OURS}, device", f"{OURS}, bfloat16 state")
#: Whose compilation is tried on which work.
COMPILE = {"gpt2": (COMPILED, *TORCHAO), "llama": (COMPILED, COMPILED_LOOP, *TORCHAO)}
#: Bytes of state per parameter where they are not two float32 numbers; scales belong to 256 and to 128 numbers.
STATE = {
    **{f"{OURS}, {name} state": 2 * sum(c.dtype.itemsize for c in of.columns) for name, of in FORMATS.items()},
    BITS_8: 2 * (1 + 4 / 256),
    TORCHAO[0]: 2 * (1 + 4 / 256),
    TORCHAO[1]: 2 * (1 / 2 + 4 / 128),
}
BUILDS: dict[str, Build] = {**CONTENDERS, **OF_OURS, f"{OURS}, device": ours(placement="device")}
#: What ours has to be nearer to float64 than.
RIGHT = 5e-5
#: An update that is as near to float64 as this is that of float32, in whatever order it adds and multiplies.
EXACT = 5e-4


def works(quick: bool, gpu: bool) -> dict[str, Work]:
    """What is stepped over; smaller on a CPU."""
    gpt2 = gpt2_shapes() if gpu else gpt2_shapes(5000, 128, 256, 4)
    if quick:
        return {"gpt2": Work("GPT-2's shapes, toys", gpt2_shapes(50, 16, 32, 1), torch.float32, 28, RIGHT)}
    found = {
        "gpt2": Work("GPT-2 124M" if gpu else "a GPT-2 of 4.7 M", gpt2, torch.float32, 28, RIGHT),
        "1000": Work("1,000 x (2, 3)", [(2, 3)] * 1000, torch.float32, 28, RIGHT),
    }
    return {**found, "llama": Work("a layer of Llama 70B", LLAMA_LAYER, torch.float32, 28, RIGHT)} if gpu else found


def moved(name: str) -> float | None:
    """Bytes that an update must move per float32 parameter: it, its gradient, its state; None if some cross a link."""
    return None if name.endswith(" on device") else 12 + 2 * STATE.get(name, 8)


def as_float32(name: str, work: Work) -> bool:
    """Whether an optimizer that quantizes does so nowhere in a work."""
    return name in QUANTIZED and max(torch.Size(shape).numel() for shape in work.shapes) < QUANTIZED_FROM


class Weighing:
    """One work, and the judge of updates over it.

    Args:
        run: where.
        key: of the work.

    Attributes:
        lives: how often a contender is built: on a GPU what its first life loads, modules and kernels, is not weighed.
    """

    def __init__(self, run: Run, key: str) -> None:
        self.run, self.key, self.device = run, key, run.device
        self.work = works(run.quick, run.device.type == "cuda")[key]
        self.reference = Reference(self.work.parameters(self.device))
        self.lives = 2 if self.device.type == "cuda" else 1

    def about(self, name: str) -> Row:
        """Columns that every row has."""
        work = self.work
        return {"key": self.key, "work": work.name, "device": self.device.type, "numel": work.numel,
                "tensors": len(work.shapes), "bytes": work.bytes_each * work.numel, "moved": moved(name),
                "case": name}  # fmt: skip

    def row(self, name: str) -> Row:
        """What a contender takes and needs, in the last of its lives."""
        params, scales = self.work.parameters(self.device), Scales(self.device)
        contender = BUILDS[name](params)
        error = self.reference.error(params, contender)
        for _ in range(1, self.lives):
            del params, contender
            if name in (COMPILED, COMPILED_LOOP, *TORCHAO):
                torch.compiler.reset()  # which would hold the first life; what it wrote into its cache stays
            self.run.free()
            params, scales = self.work.parameters(self.device), Scales(self.device)
            contender = BUILDS[name](params)
        return {**self.about(name), "error": error, "ended": None, **self._weighed(name, contender.step, scales)}

    def _weighed(self, name: str, step: Step, scales: Scales) -> Row:
        for _ in range(4):
            step()
        found: Row = {"extra": extra(step, self.device), "rounding": scales.rounding(), "others": scales.others()}
        found["away"] = away(step, self.device)
        found["state"] = scales.taken() if self.device.type == "cuda" else state_bytes(step)
        found |= {"kernels": None, "launches": None}
        if self.device.type == "cuda":
            try:
                counts = counted(step, warmup=0)
                found |= {"kernels": counts.kernels, "launches": counts.launches}
            except RuntimeError as error:  # a trace that is not whole, or none
                self.run.leave_out(f"{self.work.name}, {name}: {error}")
        cases = [Case(name, step)]
        if len(self.work.shapes) < 1000:
            cases.append(copy_of_bytes(self.work, self.device))
        times = self.run.measure(cases)
        return {**found, **times[name], "copy": times.get(COPY)}


def state_bytes(step: Any) -> int | None:
    """Bytes of an optimizer's state tensors; None of a step that is no method of one."""
    optimizer = getattr(step, "__self__", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def away(step: Any, device: torch.device) -> int:
    """Bytes of state that are not on the parameters' device: only ours says so."""
    optimizer = getattr(step, "__self__", None)
    if not isinstance(optimizer, PagedOptimizer):
        return 0
    places, home = optimizer.memory_report().by_place, "device" if device.type == "cuda" else "host"
    return sum(nbytes for place, nbytes in places.items() if place != home)


def measure(run: Run) -> Iterator[Row]:
    """A row per work and contender: error, bytes of state, at the peak and otherwise, kernels, launches, times (µs)."""
    gpu = run.device.type == "cuda"
    run.rounds, run.seconds = run.size((30, 0.6), (2, 0.05))
    for key in run.each(works(run.quick, gpu)):
        weighing = Weighing(run, key)
        for name in chosen(run, weighing.work, run.size(ON_GPU if gpu else ON_CPU, TOYS)):
            if not gpu and name.endswith("on device") and len(weighing.work.shapes) > 200:
                continue  # pages of a file under 1,000 numbers
            row: Row = {}
            with run.attempt(f"{weighing.work.name}, {name}", (Exception,)):
                row = weighing.row(name)
            if row:
                if name == f"{OURS}, device" and not row["error"] <= weighing.work.tolerance:
                    raise AssertionError(f"{weighing.work.name}, {name}: its update is off by {row['error']:.2g}")
                run.say(f"{weighing.work.name}, {name}: {row['best']:,.1f} µs, {(row['state'] or 0) / 2**20:,.1f} MiB")
                yield row
        del weighing.reference  # of doubles
        run.free()
        if gpu and not run.quick:
            yield from _compiled(run, weighing)
        else:
            run.left_out.append(f"{weighing.work.name}, {COMPILED}, torchao: need a GPU and tens of seconds")


def chosen(run: Run, work: Work, names: Sequence[str]) -> list[str]:
    """Those that are installed, and are what they are called in a work."""
    known = installed(run, names)
    if alike := [name for name in known if as_float32(name, work)]:
        why = f"keep float32 for tensors of fewer than {QUANTIZED_FROM:,} elements, and here are no others"
        run.leave_out(f"{work.name}, {', '.join(alike)}: {why}")
    return [name for name in known if name not in alike]


def _compiled(run: Run, weighing: Weighing) -> Iterator[Row]:
    """What is compiled, each in a process with empty caches: how far it got in its time is a row, too."""
    for name in chosen(run, weighing.work, COMPILE.get(weighing.key, TORCHAO)):
        found = fresh(compiled_weighed, str(run.device), weighing.key, name, limit=LIMIT).as_dict()
        yield {**weighing.about(name), **found}
        run.say(f"{weighing.work.name}, {name}: {found['ended'] or 'measured'}, {found['process_s']:.0f} s in all")
    if missing := [name for name in (COMPILED, COMPILED_LOOP) if name not in COMPILE.get(weighing.key, ())]:
        why = "lists of more than 110 tensors are compiled once, and that is foreach over GPT-2's 148"
        run.leave_out(f"{weighing.work.name}, {' and '.join(missing)}: {why}")


def compiled_weighed(device: str, key: str, name: str) -> Iterator[Row]:
    """In a process of its own: the row of a contender that is compiled."""
    yield Weighing(Run(chosen_device(device), False, console()), key).row(name)


def derive(rows: Rows) -> Rows:
    """All bytes together, the share of the copy, and who is on the front: of all, and of those that are exact."""
    found = Rows()
    for group in map(on_one_clock, rows.groups("key")):
        full = Rows()
        for row in group:
            timed = row["time"] is not None and row.get("state") is not None
            state = max(held(row), must_keep(row)) if timed else None
            need = state + row["extra"] + max(0, row["others"]) if state is not None else None
            weighed = {"weighed": state == held(row), "state": state} if timed else {"weighed": True}
            full.append({**row, **weighed, "need": need, "share": share(row) if timed else None})
        exact = [row for row in full if row.get("error") is not None and row["error"] <= EXACT]
        for row in full:
            front = {"front": on_front(row, full), "front_exact": row in exact and on_front(row, exact)}
            found.append({**row, **front})
    return found


def share(row: Row) -> float | None:
    """Of the rate of a copy, in percent, by the bytes that an update with this state must move; None if not known."""
    copy = by(row["clock"], row["copy"]) if row["copy"] else None
    each = row["bytes"] / row["numel"]
    return 100 * copy * (row["moved"] / each) / row["time"] if copy and row["moved"] else None


def held(row: Row) -> int:
    """Bytes of state beside the parameters; on a CPU what is in a file is among the tensors, too."""
    return int(row["state"]) - (row["away"] if row["device"] == "cpu" else 0)


def must_keep(row: Row) -> float:
    """Bytes of state without which there is no such update: what a graph of a step holds may escape the scales."""
    known = row["device"] == "cuda" and row["moved"] is not None
    return row["numel"] * (row["moved"] - 12) / 2 if known else 0


def on_front(row: Row, others: list[Row]) -> bool:
    """Whether nobody is as fast in as little memory and better in one of the two."""
    if row["need"] is None:
        return False
    mine = row["time"], row["need"]
    known = [(other["time"], other["need"]) for other in others if other["need"] is not None]
    return not any(its != mine and its[0] <= mine[0] and its[1] <= mine[1] for its in known)


def ended(row: Row) -> str:
    """Whether it is on the front, or why there is nothing."""
    if row.get("ended"):
        return str(row["ended"]).strip().splitlines()[-1][:120]
    where = "yes" if row["front"] else "of the exact" if row["front_exact"] else ""
    return where if row["weighed"] else f"{where} (state by reckoning)".strip()


def error(row: Row) -> str:
    """Of its update."""
    return "" if row.get("error") is None else f"{row['error']:.1e}"


def title(rows: Rows) -> str:
    """What is stepped over."""
    row = rows[0]
    return f"{row['work']} on {row['device']}: {row['numel']:,} parameters in {row['tensors']:,} tensors"


def color(name: str) -> str:
    """Ours, torch's, compiled, other packages'."""
    if name.startswith(OURS):
        return BLUE
    if name in (COMPILED, COMPILED_LOOP, TRITON):
        return PURPLE
    return GRAY if "torch " in name else ORANGE


def draw(figure: Any, rows: Rows) -> None:
    """Per work: time against bytes, both logarithmic, with the front (dotted: that of exact updates) and the bridge."""
    groups = [group for key in rows.values("key") if (group := Rows(r for r in rows.where(key=key) if r["need"]))]
    figure.set_size_inches(PAGE, 5.4 * len(groups))
    for axes, group in zip(figure.subplots(len(groups), squeeze=False).flat, groups, strict=True):
        points = [(max(row["need"], 1024) / 2**20, row["time"] / 1e3, row) for row in group]
        for x, y, row in points:
            style = "full" if row["front"] or row["front_exact"] else "none"
            marker = "o" if row["case"].startswith(OURS) else "s"
            axes.plot(x, y, marker, color=color(row["case"]), markersize=7, fillstyle=style)
        for which, line in (("front", "-"), ("front_exact", ":")):
            if front := sorted((x, y) for x, y, row in points if row[which]):
                axes.step(*zip(*front, strict=True), where="post", color="black", linewidth=1, linestyle=line)
        axes.axvline(8 * group[0]["numel"] / 2**20, color=RED, linestyle="--", linewidth=1)
        axes.set(
            xscale="log", yscale="log", xlabel="MiB of state and step on the device (log)",
            ylabel=f"ms a step, {group[0]['clock']} (log)",
        )  # fmt: skip
        axes.margins(0.12)
        axes.set_title(f"{group[0]['work']} (dashed, the bridge: two moments in float32)", fontsize="medium")
        axes.grid(alpha=0.3, which="both")
        label_beside(
            axes, [(x, y, row["case"].replace(f"{OURS}, ", "ours, "), color(row["case"])) for x, y, row in points]
        )


TABLES = [
    Table(title, by=("key",), columns={
        "contender": "case", "ms, {clock}": ms("time"), "state, MiB": mib("state"),
        "peak of the step, MiB": mib("extra"), "rounding, MiB": mib("rounding"), "not torch's, MiB": mib("others"),
        "away, MiB": mib("away"), "kernels": "kernels", "launches": "launches", "B a parameter": "moved",
        "of the copy": lambda row: "-" if row["share"] is None else f"{row['share']:.0f} %",
        "error": error, "on the front": ended,
    })
]  # fmt: skip


def beyond(rows: Rows) -> float | None:
    """What ours needs beyond two moments, in the work where that is most."""
    known = [row["need"] - 8 * row["numel"] for row in rows.where(case=f"{OURS}, device") if row["need"] is not None]
    return max(known, default=None)


def fronts(rows: Rows) -> tuple[float, str] | None:
    """Works in which ours is beaten in both by somebody who is as exact."""
    mine = rows.where(case=f"{OURS}, device")
    lost = [row["work"] for row in mine if not row["front_exact"]]
    return (len(lost), f" ({', '.join(lost)})" if lost else "") if mine else None


def far_from_one(rows: Rows) -> float | None:
    """How far the peak of a step is from an intermediate as large as the parameters."""
    return max((abs(row["extra"] / (4 * row["numel"]) - 1) for row in rows if row["need"]), default=None)


BARS = [
    Bar("works in which ours is off the front of exact updates", fronts, at_most=0),
    Bar("ours on the device, bytes beyond two moments", beyond, at_most=1 << 20, unit="B"),
    Bar("foreach's peak is one float32 number a parameter, GPT-2, off by", far_from_one, at_most=0.05, case=FOREACH,
        key="gpt2"),
]  # fmt: skip
PLOTS = [Plot("pareto", draw)]
