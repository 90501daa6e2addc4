"""What does a captured step cost, replayed, beside eager ones and torch's fused step in a graph?

Answer (H200, 2026-11): 25 µs over 1,000 small tensors, where torch's takes 153 µs in a graph and 2.8 ms eagerly.

Each is timed alone (host, GPU, wall) and as the mean of 100 replays that are queued behind each other.  Where gradients
move, a replay follows ``refresh()``, and the gradients are two sets that take turns; torch's graph cannot follow them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.lab import Case, Column, Page, Row, Rows, Run, formatted, over, series, spread
from experiments.pictures import Lines
from experiments.works import contenders
from experiments.works.contenders import FUSED, GRAPH, OURS
from experiments.works.graph import captured
from experiments.works.models import HYPER, Work, gpt2_shapes
from pagedopt import PagedAdamW

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim")
CAPTURED, MOVED = f"{OURS}, captured", f"{OURS}, captured, gradients moved"
COUNTS, QUEUED = (10, 100, 1000, 5000), 100
GPT2 = "GPT-2, 148 tensors"


def moving(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """A replay for gradients that are elsewhere each time."""
    optimizer = PagedAdamW(params, **HYPER, capturable=True)
    replay = captured(optimizer.step)
    first = [p.grad for p in params if p.grad is not None]
    sets = itertools.cycle([first, [grad.clone() for grad in first]])

    def step() -> None:
        for p, grad in zip(params, next(sets), strict=True):
            p.grad = grad
        optimizer.refresh()
        replay()

    return step


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way: times alone (µs), and the mean of queued replays (µs, wall)."""
    run.rounds, run.seconds = run.size((30, 2.0), (3, 0.1))
    works = {f"{n:,} x (2, 3)": Work("tiny", [(2, 3)] * n) for n in run.size(COUNTS, (10, 20))}
    works[GPT2] = Work("gpt2", run.size(gpt2_shapes(), gpt2_shapes(50, 16, 32, 1)))
    capturable = contenders.ours(capturable=True)
    for name, work in run.each(works.items()):
        steps = {
            OURS: contenders.ours()(work.parameters(run.device)).step,
            CAPTURED: captured(capturable(work.parameters(run.device)).step),
            MOVED: moving(work.parameters(run.device)),
            FUSED: contenders.theirs(fused=True)(work.parameters(run.device)).step,
            GRAPH: contenders.graphed()(work.parameters(run.device)).step,
        }
        alone = run.measure([Case(way, step) for way, step in steps.items()])
        for way, timing in alone.items():
            queued = series([mean_of_queued(steps[way]) for _ in range(run.size(9, 1))], "wall")
            yield {
                "work": name,
                "tensors": len(work.shapes),
                "case": way,
                **timing,
                "queued": queued,
            }


def mean_of_queued(step: Callable[[], Any]) -> float:
    """Microseconds of a step, of as many as are queued behind each other."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(QUEUED):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / QUEUED


def derive(rows: Rows) -> Rows:
    """What each takes over torch's fused step and its graph, by the wall; queued, over the kernel's time and 15 µs."""
    found = []
    for row in rows:
        ours, fused, graph = (rows.first(work=row["work"], case=case) or {} for case in (OURS, FUSED, GRAPH))
        kernel = ours.get("gpu") and {"clock": "wall", "median": 1.05 * ours["gpu"]["median"] + 15}
        ratios = {
            "of_fused": over(fused.get("wall"), row["wall"]), "of_graph": over(row["wall"], graph.get("wall")),
            "queued_of_graph": over(row["queued"], graph.get("queued")), "of_kernel": over(row["queued"], kernel),
        }  # fmt: skip
        found.append({**row, "clock": "wall", "tiny": row["work"] != GPT2, **ratios})
    return Rows(found)


TINY = "1,000 x (2, 3)"


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    columns: dict[str, Column] = {"step": "case", "host µs": "host", "GPU µs": "gpu",
        "wall µs (p10 to p90)": spread("wall"), f"wall µs of {QUEUED} queued, each": "queued",
        "torch fused ÷ it": formatted("of_fused", "{:.1f} x")}  # fmt: skip
    page.table("{work}", rows.where(work=rows[-1]["work"]), columns)
    page.detail.table("{work}", Rows(row for row in rows if row["work"] != rows[-1]["work"]), columns, by=("work",))
    page.picture("steps", rows, [Lines(title="a step of tensors of 2 x 3", x="tensors", y="wall",
        each="case", label="tensors", colors=contenders.color, where={"tiny": True})],
        "What a step costs by the wall, eager and captured")  # fmt: skip
    page.bar("GPT-2, queued, over 1.05 x the kernel + 15 µs", rows.where(work=GPT2, case=CAPTURED),
        "of_kernel", at_most=1, unit="x")  # fmt: skip
    page.bar("GPT-2, queued, over torch fused in a graph", rows.where(work=GPT2, case=CAPTURED),
        "queued_of_graph", at_most=1, unit="x")  # fmt: skip
    page.bar("1,000 tiny tensors, torch fused eager ÷ it", rows.where(work=TINY, case=CAPTURED),
        "of_fused", at_least=20, unit="x")  # fmt: skip
    page.bar("1,000 tiny tensors, over torch fused in a graph", rows.where(work=TINY, case=CAPTURED),
        "of_graph", at_most=1, unit="x")  # fmt: skip
