"""What does managed memory give when the driver moves the pages: by faults, by prefetches up and down, both at once?

Answer (H200, 2026-11): a prefetch up 51 GB/s in one call and 18 in calls of 2 MiB, down 24, both at once 38, faults
15; and calls that push pages out block the host.  So a step from the host and back takes 134 ms where ours takes 44.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.harness.columns import ms, spread_ms
from experiments.harness.rows import Row
from experiments.harness.run import Run
from experiments.harness.show import Table
from experiments.harness.time import Case
from experiments.works.link import touch
from experiments.works.paged import Problem, adamw, push_out, ranges
from pagedopt.system.cuda import driver
from pagedopt.system.cuda.driver import Location

NEEDS_GPU = True
SIZE, QUICK_SIZE = 1 << 30, 16 << 20
#: Bytes of a prefetch call; 0: everything in one.
PIECES = {"one call": 0, "64 MiB calls": 64 << 20, "2 MiB calls": 2 << 20}
FAULTS = "faults: a kernel touches every page"
BLOCKS = 132
STEP, STEP_AND_OUT, OUT = "step, pushed out before", "step and pushed out again", "pushing out alone"
#: Kinds of rows: ways of moving pages, and steps over state that the driver moves.
PAGES, STEPS = "pages", "steps"


class Pages:
    """Managed memory without advice, whose pages go to and fro."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.buffer = driver.allocate_managed(nbytes, device.index)
        driver.as_tensor(self.buffer).view(torch.float32).normal_()

    def prefetch(self, where: Location, piece: int = 0) -> None:
        """Ask for all pages, in calls of ``piece`` bytes, on the current stream."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        step = piece or self.nbytes
        for at in range(0, self.nbytes, step):
            driver.prefetch(self.buffer.address + at, min(step, self.nbytes - at), where, self.device.index, stream)

    def touch(self) -> None:
        """Read and write all of it with a kernel."""
        touch(self.buffer.address, self.nbytes, BLOCKS, self.device)


def measure(run: Run) -> Iterator[Row]:
    """Rows of ways of moving pages, with the time that the calls block the host; then of steps in driver mode."""
    problem = Problem(run)
    yield from _pages(run, run.size(SIZE, QUICK_SIZE))
    run.free()
    with run.attempt("step of placement='managed-driver'"):
        yield from _steps(problem)


def _pages(run: Run, nbytes: int) -> Iterator[Row]:
    pages, others = Pages(run.device, nbytes), Pages(run.device, nbytes)
    streams = torch.cuda.Stream(run.device), torch.cuda.Stream(run.device)
    host, device = functools.partial(pages.prefetch, Location.HOST), functools.partial(pages.prefetch, Location.DEVICE)

    def apart() -> None:
        host()
        others.prefetch(Location.DEVICE)

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            device()
        with torch.cuda.stream(streams[1]):
            others.prefetch(Location.HOST)

    cases: list[tuple[str, int, Callable[[], object], Callable[[], object]]] = [(FAULTS, nbytes, pages.touch, host)]
    cases += [
        (f"prefetch up, {name}", nbytes, functools.partial(device, piece), host) for name, piece in PIECES.items()
    ]
    cases += [
        (f"prefetch down, {name}", nbytes, functools.partial(host, piece), device) for name, piece in PIECES.items()
    ]
    cases.append(("prefetch up and down at once", 2 * nbytes, both, apart))
    for name, moved, action, before in cases:
        wall = run.wall([Case(name, action, before)], rounds=6, seconds=1.2)[name]
        blocked = _blocked(run, action, before)
        row = {"kind": PAGES, "name": name, "range_bytes": nbytes, "moved": moved, "wall": wall, "blocks_host": blocked}
        run.say(f"{name}: {rate(row):,.1f} GB/s, the calls return after {blocked['median'] / 1e3:,.2f} ms")
        yield row


def _blocked(run: Run, action: Callable[[], object], before: Callable[[], object]) -> dict[str, float]:
    """How long the calls keep the host, in µs: timed as the host's work alone."""

    def prepare() -> None:
        torch.cuda.synchronize()
        before()
        torch.cuda.synchronize()

    timing: dict[str, float] = run.host([Case("blocked", action, prepare)], rounds=4, warmup=1)["blocked"]
    torch.cuda.synchronize()
    return timing


def _steps(problem: Problem) -> list[Row]:
    """A step whose state was pushed out before, alone and with pushing out again, and pushing out alone."""
    run = problem.run
    optimizer = adamw(problem.parameters(), placement="managed-driver")
    optimizer.step()
    places = ranges(optimizer)
    out = functools.partial(push_out, places, run.device)

    def step_and_out() -> None:
        optimizer.step()
        out()

    out()
    times = run.wall([Case(STEP_AND_OUT, step_and_out)], rounds=6)
    times |= run.wall([Case(STEP, optimizer.step, before=out)], rounds=6)
    times |= run.wall([Case(OUT, out, before=optimizer.step)], rounds=6)
    for name, wall in times.items():
        run.say(f"managed-driver, {name}: {wall['median'] / 1e3:,.1f} ms")
    return [{"kind": STEPS, "name": name, "state_bytes": problem.state_bytes, "wall": wall}
            for name, wall in times.items()]  # fmt: skip


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    rows: list[Row] = [
        {"kind": PAGES, "range_bytes": part["bytes"], "moved": row["bytes"],
         **{name: row[name] for name in ("name", "wall", "blocks_host")}}
        for row in part["rows"]
    ]  # fmt: skip
    return rows + [{"kind": STEPS, "name": name, "state_bytes": part["state_bytes"], "wall": wall}
                   for name, wall in part["step"].items()]  # fmt: skip


def rate(row: Row) -> float:
    """GB/s, both directions together."""
    return float(row["moved"] / row["wall"]["median"] / 1e3)


TABLES = [
    Table(
        lambda rows: f"the driver moves pages, {rows[0]['range_bytes'] / 2**30:.3g} GiB",
        {"managed pages": "name", "GB/s": rate, "ms": ms("wall"), "the calls block the host, ms": ms("blocks_host")},
        where={"kind": PAGES},
    ),
    Table(
        "placement='managed-driver', all state on the host before",
        {"what": "name", "wall ms": ms("wall"), "p10 to p90": spread_ms("wall")},
        where={"kind": STEPS},
    ),
]
