"""What does a replay of a CUDA graph cost through each transport, is its table its own, and what does it refuse?

Answer (H200, 2026-11): 5 to 22 µs of the host; it reads the addresses of its capture whatever happens to the ring, and
a guarded one refuses lists that have moved since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Grid, Text, times
from experiments.harness.time import Case
from experiments.works.tiny_lists import TRANSPORTS, Lists
from experiments.works.ways import counts, set_rounds, ways
from pagedopt.transports.transport import Transport

NEEDS_GPU = True
COUNTS = (10, 1000, 16384)


def measure(run: Run) -> Iterator[Row]:
    """A row per transport and count: one launch is captured, checked, and replayed."""
    set_rounds(run)
    for count in run.each(counts(run, COUNTS)):
        work = Lists(1, count, run.device)
        captured = {}
        found = ways(run, TRANSPORTS, work)  # kept until the last replay: a captured table belongs to its transport
        for name, way in found.items():
            assert way is not None
            try:
                captured[name] = _capture(work, way, name)
            except (RuntimeError, MemoryError) as error:
                run.left_out.append(f"graph through {name} at {count:,} tensors: {error}")
        timings = run.measure([Case(name, replay, repeats=20) for name, (replay, _) in captured.items()])
        work.check("after replays")
        for name, timing in timings.items():
            yield {"count": count, "way": name, **captured[name][1], **timing}


def _capture(work: Lists, way: Transport, name: str) -> tuple[Callable[[], None], dict[str, str]]:
    """A counted replay, and what came of two attempts to make it read another list."""
    if work.active:
        work.rewrite()  # the set whose tensors ``work.tensors`` are
    side = work.active
    work.sweep.transport = way
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.step(way)
    work.total[side] -= work._by  # a capture runs nothing
    by = work._by

    def replay() -> None:
        graph.replay()
        work.total[side] += by

    work.rewrite()
    for _ in range(6):  # more than the ring holds: were the captured table in it, it would now name the other set
        work.step(way)
    replay()
    work.check(f"{name}: a replay after the list was rewritten")
    work.rewrite()

    guarded = work.sweep.capture({"by": 1.0})
    guarded.replay(work.tensors)
    work.total[side] += 1.0
    moved = [[*tensors[:-1], tensors[-1].clone()] for tensors in work.tensors]
    for_rewritten = _refusal(guarded.replay, before=work.rewrite)
    work.rewrite()
    for_moved = _refusal(lambda: guarded.replay(moved))
    work.check(f"{name}: after the refused replays")
    return replay, {"own_table": "kept its addresses", "rewritten": for_rewritten, "moved": for_moved}


def _refusal(replay: Callable[[], None], before: Callable[[], None] | None = None) -> str:
    """The error a replay raises, which it must."""
    if before is not None:
        before()
    try:
        replay()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a replay over moved tensors was not refused")


def refusals(rows: Rows) -> str | None:
    """What refused replays say."""
    said = dict.fromkeys(row[key] for row in rows for key in ("rewritten", "moved"))
    quoted = "\n".join(f"> {text}" for text in list(said)[:2])
    return f"Refused replays say:\n\n{quoted}" if quoted else None


TABLES = [
    Grid("replay of a CUDA graph with one step: host / GPU / wall µs", down="way", across="count", cell=times,
         corner="tensors")
]  # fmt: skip
TEXTS = [Text("graphs", refusals)]
