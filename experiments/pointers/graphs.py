"""What does a replay of a CUDA graph cost through each transport, and is its table its own?

Answer (H200, 2026-11): 5 to 22 µs of the host; it reads the addresses of its capture whatever happens to the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from experiments.lab import Case, Page, Row, Rows, Run, number, number_in
from experiments.works import ways
from experiments.works.tiny_lists import TRANSPORTS, Lists
from pagedopt.transports.transport import Transport

NEEDS_GPU = True
MEASURES = ("launch", "tables", "transports")


def measure(run: Run) -> Iterator[Row]:
    """A row per transport and count: one launch is captured, checked, and replayed."""
    for count in ways.each_count(run, (10, 1000, 16384)):
        work = Lists(1, count, run.device)
        cases = []
        found = ways.ways(run, TRANSPORTS, work)  # kept until the last replay: a captured table is its transport's
        for name, way in found.items():
            assert way is not None
            with run.attempt(f"graph through {name} at {count:,} tensors", (RuntimeError, MemoryError)):
                replay = captured(work, way, name)
                cases.append(Case(name, replay, repeats=20))
        timings = run.measure(cases)
        work.check("after replays")
        for name, timing in timings.items():
            yield {"count": count, "way": name, **timing}


def captured(work: Lists, way: Transport, name: str) -> Callable[[], None]:
    """A replay that is counted, and reads the list of its capture."""
    if work.active:
        work.rewrite()  # the set whose tensors ``work.tensors`` are
    side, by = work.active, work._by
    work.sweep.transport = way
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.step(way)
    work.total[side] -= by  # a capture runs nothing

    def replay() -> None:
        graph.replay()
        work.total[side] += by

    work.rewrite()
    for _ in range(6):  # more than the ring holds: were the captured table in it, it would now name the other set
        work.step(way)
    replay()
    work.check(f"{name}: a replay after the list was rewritten")
    work.rewrite()
    return replay


def times(row: Row) -> str:
    """Host / GPU / wall, in µs."""
    return " / ".join(number(number_in(row, clock)) for clock in ("host", "gpu", "wall"))


def report(page: Page, rows: Rows) -> None:
    """A table."""
    ways.on_grid(page, "replay of a CUDA graph with one step: host / GPU / wall µs", rows, times)
