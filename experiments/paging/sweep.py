"""What does a step cost when a share of its state is on the host, and is that the price of the bytes alone?

Answer (H200, 2026-11): yes.  With all 2.1 GB away 43.7 ms staged, at 96.6 % of the link's two-way rate, and 50.7 in
place, at 99.6 % of a plain kernel's; from there a straight line to nothing away, where it costs what it does without
paging.

One optimizer at a time, moved with ``set_device_budget``.  Going up from nothing on the device, two steps are taken at
each share and the parameters' bits compared with those of ``placement="device"`` after as many steps; coming down, the
steps are timed.  The ceilings run in the same rounds: copies both ways and the plain kernel beside a step whose state
is all on the host, ``placement="device"`` beside one whose state is all on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from experiments.clock import Case, Series
from experiments.columns import ms, percent
from experiments.comparing import best, on_one_clock
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import Lines
from experiments.works import builds
from experiments.works.in_place import InPlace
from experiments.works.link import BOTH, IN_PLACE, MOVES
from experiments.works.paged import PAGED, Problem, adamw, away_bytes, placed
from experiments.works.reference import off_by
from experiments.works.states import digest, push_out, ranges, state_tensors
from pagedopt import PagedAdamW

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
#: Shares of state on the device.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
#: Those at which the time is held to a straight line.
LINE = (0.25, 0.5, 0.75, 0.9)
STEPS = 2
DEVICE = "device"
#: A step that begins and ends with the share on the host, as the others do.
DRIVEN = "managed-driver, pushed out again"
#: Ways that have everything on the host.
ON_HOST: dict[str, dict[str, Any]] = {
    "host, staged": {"placement": "host", "host_access": "staged"},
    "host, in place": {"placement": "host", "host_access": "in_place"},
}
WAYS = {name: {**options, "device_budget": 0} for name, options in PAGED.items()} | ON_HOST
WAYS[DRIVEN] = {"placement": "managed-driver"}
#: Kinds of rows: times of a case by way and share, the bits of a way, and what the times of a way say (derived).
TIME, BITS, SAYS = "time", "bits", "says"
STEP = "step"


def measure(run: Run) -> Iterator[Row]:
    """Rows of (way, share, case) with times, the ceilings' among them, and one by way with its digests."""
    problem, link = Problem(run), InPlace.of(run)
    blocks, _ = link.best_blocks(run)
    error = off_by(builds.ours(placement=DEVICE), problem.parameters())  # all others must have its bits
    if not error <= problem.work.tolerance:
        raise AssertionError(f"placement='device' is off by {error:.2g}, allowed {problem.work.tolerance:g}")
    params = problem.parameters()
    near = adamw(params, placement=DEVICE)
    right = digests(near, params, lambda share: None)
    sizes = {"state_bytes": problem.state_bytes, "copy_bytes": link.nbytes, "blocks": blocks}
    yield {"kind": BITS, "way": DEVICE, "digests": right, "same": True, "error": error, **sizes}
    ceilings = [case for case in link.cases(blocks) if case.name in (BOTH, IN_PLACE)]
    beside = {0.0: ceilings, 1.0: [Case(DEVICE, near.step)]}
    for name, options in run.each(WAYS.items()):
        with run.attempt(name):
            yield from _way(problem, name, options, right, {} if name == DRIVEN else beside)


def _way(
    problem: Problem, name: str, options: dict[str, Any], right: str, beside: dict[float, list[Case]]
) -> Iterator[Row]:
    """The bits of a way, going up; its times and those of what runs beside it, coming down."""
    run, params = problem.run, problem.parameters()
    optimizer = adamw(params, **options)
    pushed: list[tuple[int, int]] = []

    def move(share: float) -> None:
        if name in PAGED:
            optimizer.set_device_budget(int(share * problem.state_bytes))
        elif name == DRIVEN:
            pushed[:] = tail(ranges(optimizer), int((1 - share) * problem.state_bytes))
            push_out(pushed, run.device)

    def step_and_push() -> None:
        optimizer.step()
        push_out(pushed, run.device)
        torch.cuda.synchronize()

    found = digests(optimizer, params, move)
    yield {"kind": BITS, "way": name, "digests": found, "same": found == right}
    for share in SHARES[:1] if name in ON_HOST else reversed(SHARES):
        move(share)
        cases = [Case(STEP, optimizer.step), *beside.get(share, ())]
        if name == DRIVEN:  # it blocks the host: there is no time but the wall's
            times = run.measure([Case(STEP, step_and_push)], rounds=6, device=torch.device("cpu"))
        else:  # a bar of 2 % hangs on the last share
            times = run.measure(cases, rounds=40 if share == 1.0 and not run.quick else run.rounds)
        report = optimizer.memory_report()
        away = sum(nbytes for _, nbytes in pushed) if name == DRIVEN else away_bytes(report)
        about = {"host_bytes": away, "away": away / problem.state_bytes, **placed(report)}
        run.say(f"{name}, {share:.0%} on the device: {best(times[STEP])['median'] / 1e3:,.2f} ms")
        for case, timing in times.items():
            yield {"kind": TIME, "way": name, "share": share, "case": case, **(about if case == STEP else {}), **timing}


def digests(optimizer: PagedAdamW, params: Sequence[torch.nn.Parameter], move: Callable[[float], object]) -> str:
    """Of the parameters after some steps at each share, and of the state after the last."""
    found = []
    for share in SHARES:
        move(share)
        for _ in range(STEPS):
            optimizer.step()
        found.append(digest(params))
    return " ".join([*found, digest(state_tensors(optimizer))])


def tail(places: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """The last ``nbytes`` of ranges, whole 2 MiB of them.

    >>> tail([(0, 8 << 20)], 5 << 20)
    [(4194304, 4194304)]
    """
    granule = 2 << 20
    found: list[tuple[int, int]] = []
    for address, length in reversed(places):
        part = length if nbytes >= length else nbytes // granule * granule
        if part:
            found.insert(0, (address + length - part, part))
        nbytes -= part
    return found


def derive(rows: Rows) -> Rows:
    """Times of a way by one clock, and a row more for each."""
    copies = rows.number("copy_bytes", kind=BITS)
    found = rows.where(kind=BITS)
    for group in rows.where(kind=TIME).groups("way"):
        times = on_one_clock(group)
        bits = rows.first(kind=BITS, way=times[0]["way"])
        said = {"bits": "same" if bits is None or bits["same"] else "different", **says(times, copies)}
        found += [*times, {"kind": SAYS, "way": times[0]["way"], "clock": times[0]["clock"], **said}]
    return found


def ceiling(way: str) -> str:
    """What a step with all its state on the host is held to."""
    return BOTH if way.endswith("staged") else IN_PLACE


def says(times: Rows, copies: float | None) -> Row:
    """What the times of a way say, None where one is missing; ``copies``: bytes of a copy in one direction.

    ``rate`` (GB/s): of a step whose state is all away, up and down; ``of_ceiling``: % of what its ceiling has;
    ``worst``: of its times over a line, x · (all away) + (nothing away), x the share away; ``near``: how much longer
    (%) than with ``placement="device"`` it takes when nothing is away.
    """
    held_to = ceiling(times[0]["way"])
    away, near = (times.number("time", case=STEP, share=share) for share in (0.0, 1.0))
    top, device = times.number("time", case=held_to, share=0.0), times.number("time", case=DEVICE, share=1.0)
    nbytes = times.number("host_bytes", case=STEP, share=0.0)
    found: Row = dict.fromkeys(("rate", "of_ceiling", "worst", "near"))
    if nbytes and away:
        found["rate"] = 2 * nbytes / away / 1e3
        if copies and top:
            found["of_ceiling"] = 100 * ((nbytes / away) / (copies * MOVES[held_to][0] / top))
    line = [row for row in times.where(case=STEP) if row["share"] in LINE]
    if away and near and len(line) == len(LINE):
        found["worst"] = max(row["time"]["median"] / (row["away"] * away + near) for row in line)
    if near and device:
        found["near"] = 100 * (near / device - 1)
    return found


#: Times of steps, without the ceilings'.
TIMED = {"kind": TIME, "case": STEP}


SAID: dict[str, Column] = {
    "way": "way",
    "GB/s, all on the host": "rate",
    "of the ceiling": percent("of_ceiling"),
    "worst ÷ line": "worst",
    "all on the device, over device": percent("near", "{:+.1f} %"),
    "bits": "bits",
}


def bars(page: Page, rows: Rows) -> None:
    """All away for every way but the driver's; the line and nothing away for those with a budget; bits."""
    for way in PAGED | ON_HOST:
        most, name = (95, "the link's two-way rate") if ceiling(way) == BOTH else (97, "a plain kernel in place")
        title = f"all state on the host, {way}, share of {name}"
        page.bar(title, rows.where(kind=SAYS, way=way), "of_ceiling", f"≥ {most} %")
    for way in PAGED:
        title = f"{way}: time ÷ straight line in the share away, worst of 10 to 75 %"
        page.bar(title, rows.where(kind=SAYS, way=way), "worst", "≤ 1.05 x")
    for way in PAGED:
        title = f"{way}: budget covers everything, time over placement='device'"
        page.bar(title, rows.where(kind=SAYS, way=way), "near", "≤ 2 %")
    different = "ways whose bits differ from placement='device'"
    page.bar(different, rows.where(kind=BITS), lambda rows: float(sum(not row["same"] for row in rows)), "≤ 0")


def in_ms(row: Row) -> Series | None:
    """A time by the wall, with its spread."""
    return {**wall, **{of: wall[of] / 1e3 for of in ("median", "p10", "p90")}} if (wall := row["wall"]) else None


PRICED = Lines(
    title="A step takes the time of its bytes: a straight line in the share on the host",
    x="away",
    y=in_ms,
    unit="ms",
    each="way",
    label="share of state on the host",
    log="",
    inches=4.3,
)


def report(page: Page, rows: Rows) -> None:
    """A table and a picture."""
    title = "GPU time (wall where the host is blocked), ms, by share of state on the device"
    page.grid(title, rows.where(**TIMED), "way", "share", ms("time"), "way", "{:.0%}".format)
    page.table("what the times say", rows.where(kind=SAYS), SAID)
    page.picture("shares", rows.where(**TIMED), [PRICED])
    bars(page, rows)
