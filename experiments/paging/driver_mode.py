"""Part ``driver``: what managed memory gives when the driver moves the pages: faults, prefetches up and down, both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from experiments.bench import Case
from experiments.paging.link import touch
from experiments.paging.problem import Run, adamw, push_out, ranges
from pagedopt.system import driver
from pagedopt.system.driver import Location

SIZE, QUICK_SIZE = 1 << 30, 16 << 20
#: Bytes of a prefetch call; 0: everything in one.
PIECES = {"one call": 0, "64 MiB calls": 64 << 20, "2 MiB calls": 2 << 20}
FAULTS = "faults: a kernel touches every page"
BLOCKS = 132
STEP, STEP_AND_OUT, OUT = "step, pushed out before", "step and pushed out again", "pushing out alone"


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


def part(run: Run) -> dict[str, Any]:
    """Rates of each way of moving pages, the time a call blocks the host, and a step in driver mode."""
    nbytes = QUICK_SIZE if run.quick else SIZE
    rows = _rates(run, nbytes)
    run.free()
    step: dict[str, Any] = {}
    with run.attempt("step of placement='managed-driver'"):
        step = _step(run)
    return {"bytes": nbytes, "rows": rows, "step": step, "state_bytes": run.state_bytes}


def _rates(run: Run, nbytes: int) -> list[dict[str, Any]]:
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
    rows = []
    for name, moved, action, before in cases:
        wall = run.wall([Case(name, action, before)], rounds=6, seconds=1.2)[name]
        blocked = _blocked(run, action, before)
        rate = moved / (wall["median"] / 1e6)
        rows.append({"name": name, "bytes": moved, "wall": wall, "blocks_host": blocked, "rate": rate})
        run.say(f"{name}: {rate / 1e9:,.1f} GB/s, the calls return after {blocked['median'] / 1e3:,.2f} ms")
    return rows


def _blocked(run: Run, action: Callable[[], object], before: Callable[[], object]) -> dict[str, float]:
    """How long the calls keep the host, in µs: timed as the host's work alone."""

    def prepare() -> None:
        torch.cuda.synchronize()
        before()
        torch.cuda.synchronize()

    timing = run.host(Case("blocked", action, prepare), rounds=4)
    torch.cuda.synchronize()
    return timing


def _step(run: Run) -> dict[str, Any]:
    """A step whose state was pushed out before, alone and with pushing out again, and pushing out alone."""
    optimizer = adamw(run.parameters(), placement="managed-driver")
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
    return times
