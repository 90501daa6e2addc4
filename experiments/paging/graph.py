"""What does a staged step cost the host and the card as one CUDA graph, and call by call?

Answer (H200, 2026-11): with state of 1.56 B parameters in float32 (743 pages) ``step()`` returns after 6.7 ms and not
after 201, in 8 bits (187 pages) after 3.6 and not 44; the card takes what its bytes take in both ways.

Copies go up and down both ways: a step takes at least what its bytes take at the rate of the link measured beside it.
A graph is made in the second step; what that takes beyond a step that launches it is the time of making it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from experiments.clock import Case, series
from experiments.columns import ms, ratio
from experiments.comparing import best, on_one_clock, over
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.works.link import BOTH, MOVES, Link
from experiments.works.models import HYPER, Work
from experiments.works.paged import FULL, QUICK, away_bytes, pace
from experiments.works.staged import staged
from pagedopt import PagedAdamW
from pagedopt.commands.gpt import GPT
from pagedopt.planning.sizes import SIZES

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
GRAPH, CALLS = "graph", "calls"
FP32, INT8 = "float32", "int8"
GPT2_XL, PAGE, ARENAS = "1.56 B (580 tensors)", "one page", "16 arenas"


def shapes(name: str) -> list[tuple[int, ...]]:
    """Of the parameters of a GPT of :data:`SIZES`."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in GPT(SIZES[name]).parameters()]


def works(run: Run) -> list[tuple[str, Work, str]]:
    """(name, work, format of state)."""
    full = run.size(FULL, QUICK)
    large = Work(GPT2_XL, shapes(run.size("gpt2-xl", "tiny")), torch.float32, 28, 5e-5)
    page = Work(PAGE, [(100_000,)], torch.float32, 28, 5e-5)
    arenas = Work(ARENAS, [(1024, 1024)] * 16, torch.float32, 28, 5e-5)
    of_two = [(work.name if work is full else GPT2_XL, work, state) for work in (full, large) for state in (FP32, INT8)]
    return [*of_two, (PAGE, page, FP32), (ARENAS, arenas, FP32)]


def measure(run: Run) -> Iterator[Row]:
    """A row per work, format and way: times of a step, of making the graph, and bytes."""
    pace(run)
    run.seconds = run.size(3.0, 0.1)  # bars hang on a hundredth
    link = Link.of(run)
    both = best(run.measure([Case(BOTH, link.both)])[BOTH])
    rate = sum(MOVES[BOTH]) * link.nbytes / both["median"], both["clock"]
    del link
    run.free()
    for name, work, state in run.each(works(run)):
        with run.attempt(f"{name}, {state}"):
            yield from _ways(run, name, work, state, rate)


def _ways(run: Run, name: str, work: Work, state: str, rate: tuple[float, str]) -> Iterator[Row]:
    """Rows of one work: both ways take turns; ``rate``: bytes a µs of copies both ways, and the clock."""
    params = work.parameters(run.device)
    cases, about = [], {}
    for way in (GRAPH, CALLS):
        optimizer = _optimizer(params, state, way, apart=name == ARENAS)
        before = torch.cuda.mem_get_info(run.device)[0]
        made = _made(optimizer)
        taken = before - torch.cuda.mem_get_info(run.device)[0]
        report = optimizer.memory_report()
        away = away_bytes(report)
        about[way] = {
            "pages": sum(arena.layout.pages for arena in optimizer.store.arenas), "bytes": 2 * away,
            "floor": series([2 * away / rate[0]], rate[1]), "made": made, "taken": taken,
        }  # fmt: skip
        cases.append(Case(way, optimizer.step))
    for way, timing in run.measure(cases).items():
        yield {"work": name, "state": state, "way": way, **about[way], **timing}


def _optimizer(params: Sequence[torch.nn.Parameter], state: str, way: str, apart: bool) -> PagedAdamW:
    """An optimizer behind its first step, all of its state on the host; ``apart``: each parameter in its own arena."""
    options: Any = {**HYPER, "state_format": state, "device_budget": 0}
    with staged(way):
        optimizer = PagedAdamW(params[:1] if apart else params, **options)
    optimizer.step()
    for p in params[1:] if apart else ():
        optimizer.add_param_group({"params": [p]})
        optimizer.step()
    return optimizer


def _made(optimizer: PagedAdamW) -> dict[str, Any]:
    """Microseconds that the host takes for the second step, beyond the least of the next three."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return series([max(0.0, times[0] - min(times[1:]))], "host")


def derive(rows: Rows) -> Rows:
    """Over the floor, and over the step call by call."""
    found = Rows()
    for group in map(on_one_clock, rows.groups("work", "state")):
        calls = group.first(way=CALLS)
        for row in group:
            step, host = row["time"]["median"], row["host"]["median"]
            of_calls = over(row["time"], calls and calls["time"]) if row["way"] == GRAPH else None
            found.append({
                **row, "of_floor": step / row["floor"]["median"], "of_calls": of_calls,
                "host_ms": host / 1e3, "steps": row["made"]["median"] / step, "mib": row["taken"] / 2**20,
            })  # fmt: skip
    return found


COLUMNS: dict[str, Column] = {
    "state": lambda row: f"{row['work']}, {row['state']}", "way": "way", "pages": lambda row: f"{row['pages']:,}",
    "ms": ms("time"), "÷ floor": ratio("of_floor"), "÷ calls": ratio("of_calls"),
    "host, ms": ms("host"),
}  # fmt: skip


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    title = "a step whose state is all on the host"
    page.table(title, Rows(row for row in rows if row["work"] not in (PAGE, ARENAS)), COLUMNS)
    for state, most in ((FP32, 6), (INT8, 3)):
        page.bar(f"1.56 B, {state}: host", rows.where(work=GPT2_XL, state=state, way=GRAPH), "host_ms", f"≤ {most} ms")
    for work, state in ((FULL.name, FP32), (FULL.name, INT8), (PAGE, FP32), (ARENAS, FP32)):
        page.bar(f"{work}, {state}: graph over calls", rows.where(work=work, state=state, way=GRAPH), "of_calls",
            "≤ 1.01 x")  # fmt: skip
    for state in (FP32, INT8):
        page.bar(f"1.56 B, {state}: making a graph, in steps", rows.where(work=GPT2_XL, state=state, way=GRAPH),
            "steps", "≤ 2 x")  # fmt: skip
    page.bar("1.56 B, int8: memory taken", rows.where(work=GPT2_XL, state=INT8, way=GRAPH), "mib", "≤ 16 MiB")
