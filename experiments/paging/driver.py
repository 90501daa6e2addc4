"""What does managed memory give when the driver moves the pages: by faults, by prefetches up and down, both at once?

Answer (H200, 2026-11): a prefetch up 51 GB/s in one call and 18 in calls of 2 MiB, down 24, both at once 38, faults
15; and calls that push pages out block the host.  So a step from the host and back takes 134 ms where ours takes 44.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from experiments.lab import Case, Column, Page, Row, Rows, Run, gb_per_s, ms, spread_ms
from experiments.works.link import touch
from experiments.works.paged import Problem, adamw, push_out, ranges
from pagedopt.system import driver
from pagedopt.system.driver import Location

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
SIZE, QUICK_SIZE = 1 << 30, 16 << 20
#: Bytes of a prefetch call; 0: everything in one.
PIECES = {"one call": 0, "64 MiB calls": 64 << 20, "2 MiB calls": 2 << 20}
FAULTS, AT_ONCE = "faults: a kernel touches every page", "prefetch up and down at once"
BLOCKS = 132
STEP, STEP_AND_OUT, OUT = "step, pushed out before", "step and pushed out again", "pushing out alone"
#: Kinds of rows: ways of moving pages, and steps over state that the driver moves.
PAGES, STEPS = "pages", "steps"


def prefetch(pages: driver.Buffer, where: Location, piece: int = 0) -> None:
    """Ask for all pages of managed memory without advice, in calls of ``piece`` bytes, on the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    step = piece or pages.nbytes
    for at in range(0, pages.nbytes, step):
        driver.prefetch(pages.address + at, min(step, pages.nbytes - at), where, pages.device, stream)


def measure(run: Run) -> Iterator[Row]:
    """Rows of ways of moving pages, with the time that the calls block the host; then of steps in driver mode."""
    problem = Problem(run)
    yield from _pages(run, run.size(SIZE, QUICK_SIZE))
    run.free()
    with run.attempt("step of placement='managed-driver'"):
        yield from _steps(problem)


def _pages(run: Run, nbytes: int) -> Iterator[Row]:
    pages, others = (driver.allocate_managed(nbytes, run.device.index) for _ in range(2))
    for buffer in (pages, others):
        driver.as_tensor(buffer).view(torch.float32).normal_()
    streams = torch.cuda.Stream(run.device), torch.cuda.Stream(run.device)
    up, down = (functools.partial(prefetch, pages, where) for where in (Location.DEVICE, Location.HOST))

    def apart() -> None:
        down()
        prefetch(others, Location.DEVICE)

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            up()
        with torch.cuda.stream(streams[1]):
            prefetch(others, Location.HOST)

    cases = [Case(FAULTS, lambda: touch(pages.address, nbytes, BLOCKS, run.device), down)]
    for way, there, back in (("up", up, down), ("down", down, up)):
        cases += [Case(f"prefetch {way}, {n}", functools.partial(there, size), back) for n, size in PIECES.items()]
    for case in [*cases, Case(AT_ONCE, both, apart)]:
        wall = run.wall([case], rounds=6, seconds=1.2)[case.name]
        blocked = _blocked(run, case)
        run.say(f"{case.name}: {wall['median'] / 1e3:,.2f} ms, the calls return after {blocked['median'] / 1e3:,.2f}")
        about = {"range_bytes": nbytes, "moved": 2 * nbytes if case.name == AT_ONCE else nbytes}
        yield {"kind": PAGES, "name": case.name, **about, "wall": wall, "blocks_host": blocked}


def _blocked(run: Run, case: Case) -> Row:
    """How long the calls keep the host: a series of the host's work alone."""

    def settled() -> None:
        torch.cuda.synchronize()
        case.prepare()
        torch.cuda.synchronize()

    found: Row = run.host([Case(case.name, case.run, settled)], rounds=4, warmup=1)[case.name]
    torch.cuda.synchronize()
    return found


def _steps(problem: Problem) -> Iterator[Row]:
    """A step whose state was pushed out before, alone and with pushing out again, and pushing out alone."""
    optimizer = adamw(problem.parameters(), placement="managed-driver")
    optimizer.step()
    out = functools.partial(push_out, ranges(optimizer), problem.device)

    def step_and_out() -> None:
        optimizer.step()
        out()

    cases = Case(STEP_AND_OUT, step_and_out, out), Case(STEP, optimizer.step, out), Case(OUT, out, optimizer.step)
    for case in cases:
        wall = problem.run.wall([case], rounds=6)[case.name]
        problem.run.say(f"managed-driver, {case.name}: {wall['median'] / 1e3:,.1f} ms")
        yield {"kind": STEPS, "name": case.name, "state_bytes": problem.state_bytes, "wall": wall}


MOVES: dict[str, Column] = {
    "managed pages": "name",
    "GB/s": gb_per_s("moved", "wall"),
    "ms": ms("wall"),
    "the calls block the host, ms": ms("blocks_host"),
}
WAITS: dict[str, Column] = {"what": "name", "wall ms": ms("wall"), "p10 to p90": spread_ms("wall")}


def report(page: Page, rows: Rows) -> None:
    """Tables."""
    page.table(lambda rows: f"the driver moves pages, {rows[0]['range_bytes'] / 2**30:.3g} GiB",
        rows.where(kind=PAGES), MOVES)  # fmt: skip
    page.detail.table("placement='managed-driver', all state on the host before", rows.where(kind=STEPS), WAITS)
