"""What does each optimizer take in time, and what does it need in memory, over the same parameters?

Answer (H200, 2026-11): for a layer of a Llama 70B ours takes 90 % of the rate of a copy, torch fused 79 %, in the same
memory; below that state goes to 16 bits or to the host.  Over many small tensors a CUDA graph's host is faster.

AdamW on every rung and of every package, with our state wherever it may lie and in every format.  Contenders come one
after the other, each alone over the same parameters, so that what memory it takes is its own: bytes of state, and bytes
at the peak of a step beyond it, as torch's allocator is asked for them, and what else of the device is gone.  A copy of
the bytes of a float32 update runs in interleaved rounds with each, and is scaled to what an update with that state must
move.  Times of one work are by one clock.  Four updates are held to float64 first: *exact* are those that are off by no
more than 5e-4 of themselves, as float32 in another order is (decay after the update: 1e-4), and narrower state is not
(bfloat16: 7e-4).  Whoever is on the front is not beaten in both by anyone else.  torch's
compiled step runs in a process of its own, over the layer alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from experiments.clock import Case
from experiments.columns import error, last_line, mib, ms, percent
from experiments.comparing import on_one_clock
from experiments.device import chosen_device
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import GRAY, RED, Lines
from experiments.works import contenders
from experiments.works.contenders import OURS_GRAPH, Contender
from experiments.works.fresh import fresh
from experiments.works.models import COMPILED, COPY, FOREACH, FUSED, GRAPH, LLAMA_LAYER, OURS, Bound, Work, gpt2_shapes
from experiments.works.reference import Reference
from experiments.works.steps import copy_of_bytes, of_copy
from experiments.works.weight import Scales, extra
from pagedopt import PagedOptimizer

MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
DEVICE, LAYER = f"{OURS}, device", "llama"
TOYS = (FOREACH, FUSED, DEVICE, f"{OURS}, bfloat16 state")
#: Whose state goes where it is used: paged_state weighs them.
ELSEWHERE = (OURS, f"{OURS}, managed state")
#: An update that is as near to float64 as this is that of float32, in whatever order it adds and multiplies.
EXACT = 5e-4


def works(run: Run) -> dict[str, Work]:
    """What is stepped over; smaller on a CPU."""
    if run.quick:
        return {"gpt2": Work("GPT-2's shapes, toys", gpt2_shapes(50, 16, 32, 1))}
    tiny = Work("1,000 x (2, 3)", [(2, 3)] * 1000)
    if run.device.type == "cpu":
        return {"gpt2": Work("a GPT-2 of 4.7 M", gpt2_shapes(5000, 128, 256, 4)), "1000": tiny}
    return {"gpt2": Work("GPT-2 124M", gpt2_shapes()), "1000": tiny, LAYER: Work("a layer of Llama 70B", LLAMA_LAYER)}


def chosen(run: Run, work: Work) -> Iterator[Contender]:
    """Those that are installed, and of use here."""
    asked = [c for c in contenders.CONTENDERS.values() if c.name not in (*ELSEWHERE, COMPILED)]
    if run.device.type == "cpu":  # where state that crosses lies in pages of a file, each of 1,000 numbers and more
        asked = [
            c
            for c in asked
            if not c.needs and c.name not in (GRAPH, OURS_GRAPH) and not (c.crosses and len(work.shapes) > 200)
        ]
    names = contenders.installed(run, [c.name for c in asked if c.name in TOYS or not run.quick])
    for contender in (contenders.CONTENDERS[name] for name in names):
        if contender.narrow_from > max(torch.Size(shape).numel() for shape in work.shapes):
            run.leave_out(
                f"{work.name}, {contender.name}: keeps float32 for tensors of fewer than {contender.narrow_from:,} "
                "elements, and here are no others"
            )
        else:
            yield contender


def about(run: Run, key: str, contender: Contender) -> Row:
    """Columns that every row has."""
    work = works(run)[key]
    sizes = {"numel": work.numel, "tensors": len(work.shapes), "bytes": work.bytes_each * work.numel}
    place = {"key": key, "work": work.name, "device": run.device.type}
    return {**place, **sizes, "moved": contender.moved, "case": contender.name}


def weighed(run: Run, work: Work, contender: Contender, reference: Reference) -> Row:
    """What a contender takes and needs, in its second life: what the first one loads is not weighed."""
    params = work.parameters(run.device)
    bound = contender.build(params)
    error = reference.error(params, bound)
    if contender.name == DEVICE and not error <= work.tolerance:
        raise AssertionError(f"{work.name}, {DEVICE}: its update is off by {error:.2g}")
    del params, bound
    if contender.name == COMPILED:
        torch.compiler.reset()  # which would hold the first life; what it wrote into its cache stays
    run.free()
    params, scales = work.parameters(run.device), Scales(run.device)
    bound = contender.build(params)
    for _ in range(4):
        bound.step()
    found: Row = {"error": error, "ended": None}
    found |= {"extra": extra(bound.step, run.device), **scales.since(), "away": away(bound, run.device)}
    taken, gpu = found.pop("taken"), run.device.type == "cuda"
    found["state"] = taken if gpu else state_bytes(bound)
    cases = [Case(contender.name, bound.step)]
    if len(work.shapes) < 1000:
        cases.append(copy_of_bytes(work, run.device))
    times = run.measure(cases)
    return {**found, **times[contender.name], "copy": times.get(COPY)}


def state_bytes(bound: Bound) -> int | None:
    """Bytes of an optimizer's state tensors; None of a step that is no method of one."""
    if bound.optimizer is None:
        return None
    tensors = [t for state in bound.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in tensors)


def away(bound: Bound, device: torch.device) -> int:
    """Bytes of state that are not on the parameters' device: only ours says so."""
    if not isinstance(bound.optimizer, PagedOptimizer):
        return 0
    home = "device" if device.type == "cuda" else "host"
    return sum(nbytes for place, nbytes in bound.optimizer.memory_report().by_place.items() if place != home)


def measure(run: Run) -> Iterator[Row]:
    """A row per work and contender: error, bytes of state, at the peak and otherwise, times (µs)."""
    run.rounds, run.seconds = run.size((30, 0.6), (2, 0.05))
    for key, work in run.each(works(run).items()):
        reference = Reference(work.parameters(run.device))
        for contender in chosen(run, work):
            refusals = () if contender.name == DEVICE else (Exception,)
            with run.attempt(f"{work.name}, {contender.name}", refusals):
                yield {**about(run, key, contender), **weighed(run, work, contender, reference)}
        del reference  # of doubles
        run.free()
        if key == LAYER:  # how far it got in its time is a row, too
            found = fresh(compiled_weighed, str(run.device), limit=contenders.LIMIT)
            yield {**about(run, key, contenders.CONTENDERS[COMPILED]), **found.as_dict()}


def compiled_weighed(device: str) -> Iterator[Row]:
    """In a process of its own, with empty caches: what torch's compiled step over the layer takes and needs."""
    run = Run(chosen_device(device))
    work = works(run)[LAYER]
    yield weighed(run, work, contenders.CONTENDERS[COMPILED], Reference(work.parameters(run.device)))


def derive(rows: Rows) -> Rows:
    """All bytes together, the share of the copy, and who is on the front: of all, and of those that are exact."""
    found = Rows()
    for group in map(on_one_clock, rows.groups("key")):
        full = [{**row, **reckoned(row)} for row in group]
        exact = [row for row in full if row.get("error") is not None and row["error"] <= EXACT]
        for row in full:
            front = {"front": on_front(row, full), "front_exact": row in exact and on_front(row, exact)}
            found.append({**row, **front})
    return found


def reckoned(row: Row) -> Row:
    """Bytes of state and step on the device, and the share of a copy of what an update with this state must move.

    State in a file is among a CPU's tensors, and is not counted; what a graph of a step holds may escape a GPU's
    scales, and counts as what such an update cannot do without.
    """
    if row["time"] is None or row.get("state") is None:
        return {"weighed": True, "need": None, "share": None}
    gpu, moved, numel = row["device"] == "cuda", row["moved"], row["numel"]
    held = row["state"] - (0 if gpu else row["away"])
    state = max(held, numel * (moved - 12) / 2 if gpu and moved else 0)
    need = state + row["extra"] + max(0, row["others"])
    share = of_copy(row, row["copy"])
    share = share * moved / (row["bytes"] / numel) if share and moved else None
    beyond = {"beyond": need - 8 * numel, "from_one": abs(row["extra"] / (4 * numel) - 1)}
    return {"weighed": state == held, "state": state, "need": need, "share": share, **beyond}


def on_front(row: Row, others: Sequence[Row]) -> bool:
    """Whether nobody is as fast in as little memory and better in one of the two."""
    if row["need"] is None:
        return False
    time, need = row["time"]["median"], row["need"]
    known = [(other["time"]["median"], other["need"]) for other in others if other["need"] is not None]
    return not any(its[0] <= time and its[1] <= need and its != (time, need) for its in known)


def ended(row: Row) -> str:
    """Whether it is on the front, or why there is nothing."""
    where = "yes" if row["front"] else "of exact ones" if row["front_exact"] else ""
    return last_line()(row) or (where if row["weighed"] else f"{where} (state by reckoning)".strip())


def fronts(rows: Rows) -> tuple[float, str]:
    """Works in which ours is beaten in both by somebody who is as exact."""
    lost = [row["work"] for row in rows if not row["front_exact"]]
    return len(lost), f" ({', '.join(lost)})" if lost else ""


class Front(Lines):
    """A mark per contender, with the fronts and the bridge; who is on a front is named, the others are grey."""

    def draw(self, axes: Any, rows: Rows) -> None:
        """The lines beneath the marks."""
        axes.axvline(8 * rows[0]["numel"] / 2**20, color=RED, linestyle="--", linewidth=1)
        for which, style in (("front", "-"), ("front_exact", ":")):
            if front := self.points(rows.where(**{which: True})):
                across, up, _ = zip(*front, strict=True)
                axes.step(across, up, where="post", color="black", linewidth=1, linestyle=style)
        for x, y, _ in self.points(rows.where(front=False, front_exact=False)):
            axes.scatter(x, y, color=GRAY, alpha=0.5, s=16, linewidths=0)
        super().draw(axes, Rows(row for row in rows if row["front"] or row["front_exact"]))


def named(contender: str) -> str:
    """A colour: grey is for those that are not named."""
    return "black" if (color := contenders.color(contender)) == GRAY else color


PANELS = [
    Front(
        title="{work}, {numel:,} parameters",
        unit="ms a step",
        x=lambda row: None if row["need"] is None else max(row["need"], 1024) / 2**20,
        y=ms("time"),
        each="case",
        label="MiB of state and step on the device",
        colors=named,
        inches=4.4,
    )
]
TITLE = """Solid: the Pareto front; dotted: that of updates as exact as float32's
grey: the others; dashed: two moments in float32"""


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    columns: dict[str, Column] = {"contender": "case", "ms, {clock}": ms("time"),
        "device, MiB": mib("need"), "host, MiB": mib("away"), "of the copy": percent("share", "{:.0f} %"),
        "error": error(), "on the Pareto front": ended}  # fmt: skip
    layer = rows.where(key=LAYER)
    front = Rows(row for row in layer if row["front"] or row["front_exact"])
    page.table("{work}: nobody is faster in less memory", front, columns)
    page.picture("pareto-llama", layer, PANELS, TITLE)
    page.bar("works in which ours is off the Pareto front of exact updates", rows.where(case=DEVICE), fronts, "≤ 0")
    page.bar("ours on the device, bytes beyond two moments", rows.where(case=DEVICE), "beyond", "≤ 1,048,576 B")
    page.bar("foreach's peak is one float32 number a parameter, GPT-2, off by", rows.where(case=FOREACH, key="gpt2"),
        "from_one", "≤ 0.05")  # fmt: skip
