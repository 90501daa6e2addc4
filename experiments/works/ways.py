"""Ways of a list of pointers into a kernel, checked and timed over lists of tiny tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from mmap import PAGESIZE

from experiments.lab import Case, Column, Page, Row, Rows, Run
from experiments.pictures import Lines
from experiments.works.tiny_lists import Lists, Make
from pagedopt.transports.ring import ManagedTransport
from pagedopt.transports.transport import Transport

COUNTS = (10, 100, 1000, 4096, 16384, 65536)
MODES = {
    "rewritten": "list rewritten before every step",
    "new scalars": "list unchanged, hyperparameters new (every step of AdamW)",
    "unchanged": "nothing changed",
}
#: Launches that a gated sample may queue; a stream holds about a thousand.
QUEUE = 600
#: Panels of what :func:`sweep` measures: the host's time is like the wall's, and that of a list unchanged, too.
PANELS = [
    Lines(title=title, x="count", y=clock, each="way", where={"mode": "rewritten"}, label="tensors", inches=3.8)
    for clock, title in (("wall", "the whole step"), ("gpu", "its time on the GPU"))
]


def each_count(run: Run, counts: Sequence[int] = COUNTS) -> Iterator[int]:
    """Numbers of tensors in a list; toys are two small lists.  Launches of microseconds take many rounds."""
    run.rounds, run.seconds = run.size((100, 1.0), (3, 0.2))
    return run.each(run.size(tuple(counts), (10, 424)))


def ways(run: Run, make: Mapping[str, Make], lists: Lists) -> dict[str, Transport | None]:
    """The transports that work here, each of which has updated ``lists`` rightly once per set."""
    if run.device.type == "cpu":
        return {"Numba": None}
    found: dict[str, Transport | None] = {}
    for name, maker in make.items():
        # The driver refuses, or the table does not fit.
        with run.attempt(f"{name} at {len(lists.tensors[0]):,} tensors", (RuntimeError, MemoryError)):
            way = maker(run.device.index)
            lists.sweep.transport = way
            lists.sweep.prepare()
            for _ in range(3):
                lists.step(way)
                lists.rewrite()
            lists.check(name)
            found[name] = way
    return found


def sweep(run: Run, make: Mapping[str, Make], lists: int) -> Iterator[Row]:
    """Every way, count and mode: times, launches and explicitly copied bytes per step."""
    for count in each_count(run):
        work = Lists(lists, count, run.device)
        found = ways(run, make, work)
        for mode in MODES:
            before = {"rewritten": work.rewrite, "new scalars": work.other_scalar, "unchanged": None}[mode]
            counters = {name: _counters(work, way, before) for name, way in found.items()}
            cases = []
            for name, way in found.items():
                # The ring has four tables, and a fifth rewrite would wait for the gate to open.
                most = min(4 if before else 20, QUEUE // max(1, counters[name]["launches"]))
                cases.append(Case(name, functools.partial(work.step, way), before, max(1, most)))
            beside = neighbours(found)
            for name, timing in run.measure(cases).items():
                about = {"lists": lists, "count": count, "mode": mode, "way": name, "beside": beside.get(name, [])}
                yield {**about, **counters[name], **timing}
        work.check("after timing")
        run.say(f"{lists} x {count:,} tensors: {len(found)} ways, every update counted")


def neighbours(found: Mapping[str, Transport | None]) -> dict[str, list[str]]:
    """Ways whose tables of managed memory stand in a page with another's: what is advised for one is for both."""
    pages: dict[str, set[int]] = {}
    for name, way in found.items():
        if isinstance(way, ManagedTransport):
            ranges = [(buffer.source, buffer.source + buffer.words.nbytes) for buffer in way._buffers + way._reserve]
            pages[name] = {page for low, high in ranges for page in range(low // PAGESIZE, -(-high // PAGESIZE))}
    return {name: [other for other in pages if other != name and pages[other] & own] for name, own in pages.items()}


def _counters(work: Lists, way: Transport | None, before: Callable[[], None] | None) -> dict[str, int]:
    """Launches and copied bytes of one step in the steady state, in which every table of the ring has been written."""
    if way is None:
        return {"launches": 0, "copied_bytes": 0}
    launches = copied = 0
    for _ in range(6):
        launches, copied = work.sweep.launches, way.copied_bytes
        if before is not None:
            before()
        work.step(way)
    return {"launches": work.sweep.launches - launches, "copied_bytes": way.copied_bytes - copied}


def walls(rows: Rows) -> dict[int, dict[str, float]]:
    """Wall times by way (µs), of each number of tensors, the least first."""
    groups = sorted(rows.groups("count"), key=lambda group: group[0]["count"])
    return {group[0]["count"]: {row["way"]: row["wall"]["median"] for row in group} for group in groups}


def on_grid(page: Page, title: str, rows: Rows, cell: Column) -> None:
    """Ways down, counts across."""
    page.grid(title, rows, "way", "count", cell, "tensors")
