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

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from experiments.harness.columns import ms, percent
from experiments.harness.plot import LETTERS, PAGE, Plot, label_beside, look
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Grid, Table
from experiments.harness.time import Case
from experiments.works.link import BOTH, IN_PLACE, Link
from experiments.works.paged import PAGED, Problem, adamw, away_bytes, digest, placed, push_out, ranges, state_tensors
from experiments.works.reference import Contender, Reference
from pagedopt import PagedAdamW

NEEDS_GPU = True
#: Shares of state on the device.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
#: Shares on the host at which the time is held to a straight line.
LINE = (0.1, 0.25, 0.5, 0.75)
STEPS = 2
DEVICE, DRIVER = "device", "managed-driver"
#: A step that begins and ends with the share on the host, as the others do.
DRIVEN = "managed-driver, pushed out again"
#: Ways that have everything on the host.
ON_HOST: dict[str, dict[str, Any]] = {
    "host, staged": {"placement": "host", "host_access": "staged"},
    "host, in place": {"placement": "host", "host_access": "in_place"},
}
#: Kinds of rows: times of a case by way and share, the bits of a way, and what the times of a way say (derived).
TIME, BITS, SAYS = "time", "bits", "says"
STEP = "step"
#: Cases that run beside a step, by share on the device.
Beside = dict[float, list[Case]]
Digests = dict[str, list[str]]


def measure(run: Run) -> Iterator[Row]:
    """Rows of (way, share, case) with times, the ceilings' among them, and one by way with its digests."""
    problem, digests = Problem(run), Digests()
    link = Link(run)
    blocks, _ = link.best_blocks(run)
    ceilings = [Case(BOTH, link.both), Case(IN_PLACE, functools.partial(link.in_place, blocks))]
    all_near, error = _near(problem, digests)
    beside = {0.0: ceilings, 1.0: [Case(DEVICE, all_near)]}
    sizes = {"state_bytes": problem.state_bytes, "copy_bytes": link.nbytes, "blocks": blocks}
    yield {"kind": BITS, "way": DEVICE, "digests": " ".join(digests[DEVICE]), "same": True, "error": error, **sizes}
    for name, options in run.each((PAGED | ON_HOST | {DRIVEN: {}}).items()):
        with run.attempt(name):
            if name == DRIVEN:
                yield from _driver(problem, digests)
            else:
                yield from (_paged if name in PAGED else _on_host)(problem, name, options, beside, digests)
        yield from _bits(run, name, digests)


def _near(problem: Problem, digests: Digests) -> tuple[Callable[[], object], float]:
    """The step of ``placement="device"``, whose bits all others must have; and its error against float64."""
    params = problem.parameters()
    reference, optimizer = Reference(params), adamw(params, placement="device")
    error, allowed = reference.error(params, Contender(optimizer.step)), problem.work.tolerance
    if not error <= allowed:
        raise AssertionError(f"placement='device' is off by {error:.2g} of its update, allowed {allowed:g}")
    del params, reference, optimizer
    params = problem.parameters()
    optimizer = adamw(params, placement="device")
    digests[DEVICE] = _walk(optimizer, params, lambda share: None)
    return optimizer.step, error


def _walk(
    optimizer: PagedAdamW, params: Sequence[torch.nn.Parameter], move: Callable[[float], object]
) -> list[str]:  # fmt: skip
    """Digests of the parameters after some steps at each share, and of the state after the last."""
    found = []
    for share in SHARES:
        move(share)
        for _ in range(STEPS):
            optimizer.step()
        found.append(digest(params))
    return [*found, digest(state_tensors(optimizer))]


def _bits(run: Run, way: str, digests: Digests) -> Iterator[Row]:
    """Whether a way that got through its steps has the bits of ``placement="device"``."""
    if way in digests:
        same = digests[way] == digests[DEVICE]
        if not same:
            run.say(f"{way}: DIFFERENT BITS than placement='device'")
        yield {"kind": BITS, "way": way, "digests": " ".join(digests[way]), "same": same}


def _rows(problem: Problem, way: str, optimizer: PagedAdamW, share: float, beside: Beside) -> list[Row]:
    """Times of a step, and of what runs beside it."""
    run, report = problem.run, optimizer.memory_report()
    away = away_bytes(report)
    precise = share == 1.0 and not run.quick  # a bar of 2 % hangs on this one
    cases = [Case(STEP, optimizer.step), *beside.get(share, ())]
    times = run.measure(cases, rounds=40 if precise else None)
    run.say(f"{way}, {share:.0%} on the device: {times[STEP]['best'] / 1e3:,.2f} ms")
    where = {"kind": TIME, "way": way, "share": share}
    step = {"host_bytes": away, "away": away / problem.state_bytes, **placed(report)}
    return [{**where, "case": case, **(step if case == STEP else {}), **timing} for case, timing in times.items()]


def _paged(problem: Problem, name: str, options: dict[str, Any], beside: Beside, digests: Digests) -> list[Row]:
    params = problem.parameters()
    optimizer = adamw(params, device_budget=0, **options)

    def move(share: float) -> None:
        optimizer.set_device_budget(int(share * problem.state_bytes))

    digests[name] = _walk(optimizer, params, move)
    rows = []
    for share in reversed(SHARES):
        move(share)
        rows += _rows(problem, name, optimizer, share, beside)
    return rows


def _on_host(problem: Problem, name: str, options: dict[str, Any], beside: Beside, digests: Digests) -> list[Row]:
    params = problem.parameters()
    optimizer = adamw(params, **options)
    digests[name] = _walk(optimizer, params, lambda share: None)
    return _rows(problem, name, optimizer, 0.0, beside)


def _driver_walk(problem: Problem) -> list[str]:
    """Pushed out as far as each share says before each pair of steps."""
    params = problem.parameters()
    optimizer = adamw(params, placement=DRIVER)

    def move(share: float) -> None:
        push_out(tail(ranges(optimizer), int((1 - share) * problem.state_bytes)), problem.device)

    return _walk(optimizer, params, move)


def _driver(problem: Problem, digests: Digests) -> list[Row]:
    """The driver's paging: what was pushed out comes back with the step, and is pushed out again in the same time."""
    run = problem.run
    digests[DRIVEN] = _driver_walk(problem)
    run.free()
    params = problem.parameters()
    optimizer = adamw(params, placement=DRIVER)
    optimizer.step()
    rows = []
    for share in reversed(SHARES):
        away = tail(ranges(optimizer), int((1 - share) * problem.state_bytes))

        def step_and_push(away: list[tuple[int, int]] = away) -> None:
            optimizer.step()
            push_out(away, run.device)

        push_out(away, run.device)
        wall = run.wall([Case(STEP, step_and_push)], rounds=6)[STEP]
        run.say(f"{DRIVEN}, {share:.0%} on the device: {wall['median'] / 1e3:,.2f} ms")
        nbytes = sum(n for _, n in away)
        rows.append({
            "kind": TIME, "way": DRIVEN, "share": share, "case": STEP, "host_bytes": nbytes,
            "away": nbytes / problem.state_bytes, "host": wall, "wall": wall, "gpu": None, "best": wall["median"],
        })  # fmt: skip
    return rows


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


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts, which had the ceilings beside the steps."""
    sizes = {"state_bytes": part["state_bytes"], "copy_bytes": part["link_bytes"], "blocks": part["blocks"]}
    rows: list[Row] = [
        {"kind": BITS, "way": way, "digests": " ".join(found), "same": way not in part["different"]}
        for way, found in part["digests"].items()
    ]
    rows[0] |= {"error": part["error"], **sizes}
    for row in part["rows"]:
        where = {"kind": TIME, "way": row["way"], "share": row["share"]}
        kept = ("host_bytes", "away", "host", "wall", "gpu", "best")
        rows.append({**where, "case": STEP, **{name: row[name] for name in kept}})
        rows += [{**where, "case": case, **timing} for case, timing in row["beside"].items()]
    return rows


# --- what the times say


def derive(rows: Rows) -> Rows:
    """A row more for every way: rate, share of the ceiling, worst of its line, price of a full budget, and bits."""
    copies = rows.number("copy_bytes", kind=BITS)
    said: list[Row] = []
    for times in rows.where(kind=TIME).groups("way"):
        way, away = times[0]["way"], times.first(case=STEP, share=0.0)
        same = rows.first(kind=BITS, way=way)
        said.append({
            "kind": SAYS, "way": way, "of_ceiling": share_of_ceiling(times, copies), "worst": worst_of_line(times),
            "rate": 2 * away["host_bytes"] / away["best"] / 1e3 if away and away["best"] else None,
            "near": all_near(times), "bits": "different" if same and not same["same"] else "same",
        })  # fmt: skip
    return Rows([*rows, *said])


def ceiling(way: str) -> str:
    """What a step with all its state on the host is held to."""
    return BOTH if way.endswith("staged") else IN_PLACE


def share_of_ceiling(times: Rows, copies: float | None) -> float | None:
    """Rate (%) of the step's bytes, up and down, over that of the ceiling, whose case moves ``copies`` bytes a way.

    In place, the plain kernel reads and writes two copies' worth.
    """
    away = times.first(case=STEP, share=0.0)
    beside = times.first(case=ceiling(away["way"]), share=0.0) if away else None
    if away is None or beside is None or copies is None:
        return None
    moved = copies * (1 if beside["case"] == BOTH else 2)
    return float(100 * ((away["host_bytes"] / away["best"]) / (moved / beside["best"])))


def over_line(times: Rows, share: float) -> float | None:
    """Time over x · (time with all away) + (time with nothing away), x the share that is away."""
    row, away, near = (times.first(case=STEP, share=at) for at in (share, 0.0, 1.0))
    if row is None or away is None or near is None:
        return None
    return float(row["best"] / (row["away"] * away["best"] + near["best"]))


def worst_of_line(times: Rows) -> float | None:
    """The largest of a way's times over its line."""
    found = [ratio for x in LINE if (ratio := over_line(times, round(1 - x, 2))) is not None]
    return max(found) if len(found) == len(LINE) else None


def all_near(times: Rows) -> float | None:
    """How much longer (%) a step takes than with ``placement="device"`` in the same rounds."""
    step, device = (times.first(case=case, share=1.0) for case in (STEP, DEVICE))
    return float(100 * (step["best"] / device["best"] - 1)) if step and device else None


# --- table, bar, plot

_GRID: dict[str, Any] = {
    "down": "way", "across": "share", "corner": "way", "heading": "{:.0%}".format, "where": {"kind": TIME, "case": STEP}
}  # fmt: skip
_OVER = "ms, by share of state on the device"
TABLES = [
    Grid(f"GPU time (wall where the host is blocked), {_OVER}", cell=ms("best"), **_GRID),
    Grid(f"host time of step(), {_OVER}", cell=ms("host"), **_GRID),
    Table("what the times say", where={"kind": SAYS}, columns={
        "way": "way", "GB/s, all away": "rate", "of the ceiling": percent("of_ceiling"), "worst ÷ line": "worst",
        "all near, over device": percent("near", signed=True), "bits": "bits",
    }),
]  # fmt: skip


def _on_host_bar(way: str) -> Bar:
    staged = ceiling(way) == BOTH
    name = "the link's two-way rate" if staged else "a plain kernel in place"
    title = f"all state on the host, {way}, share of {name}"
    return Bar(title, "of_ceiling", at_least=95 if staged else 97, unit="%", kind=SAYS, way=way)


BARS = [
    *map(_on_host_bar, PAGED | ON_HOST),
    *(Bar(f"{way}: time ÷ straight line in the share away, worst of 10 to 75 %", "worst",
          at_most=1.05, unit="x", kind=SAYS, way=way) for way in PAGED),
    *(Bar(f"{way}: budget covers everything, time over placement='device'", "near",
          at_most=2, unit="%", kind=SAYS, way=way) for way in PAGED),
    Bar("ways whose bits differ from placement='device'", lambda rows: float(sum(not row["same"] for row in rows)),
        at_most=0, kind=BITS),
]  # fmt: skip


def draw(figure: Any, rows: Rows) -> None:
    """A line per way over the share of state on the host, dashed the price of the bytes alone; below, ours closer."""
    figure.set_size_inches(PAGE, 8.5)
    ways = list(rows.groups("way"))
    ours = [times for times in ways if any(row["gpu"] for row in times)]
    figure.suptitle(
        "A step of AdamW over 268 M parameters, 2.1 GB of state\ndashed: share away · (all away) + (all near)",
        fontsize=LETTERS + 1,
    )
    for axes, shown in zip(figure.subplots(2), (ways, ours), strict=True):
        ends = []
        for times in shown:
            style = look(ways.index(times))
            points = sorted((row["away"], row["best"] / 1e3) for row in times)
            axes.plot(*zip(*points, strict=True), markersize=6, linewidth=1, **style)
            ends.append((*points[-1], times[0]["way"], style["color"]))
            away, near = times.first(share=0.0), times.first(share=1.0)
            if away and near and len(points) > 2:
                line = [near["best"] / 1e3, (away["away"] * away["best"] + near["best"]) / 1e3]
                axes.plot([0, away["away"]], line, "--", color=style["color"], alpha=0.6, linewidth=0.8)
        axes.set(xlabel="share of state on the host", ylabel="ms a step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        label_beside(axes, ends)
    figure.axes[1].set_title("the same without the driver's paging", fontsize=LETTERS + 1)


PLOTS = [Plot("shares", draw, where={"kind": TIME, "case": STEP})]
