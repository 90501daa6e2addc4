"""Part ``sweep``: time of a step against the share of state on the device, for every placement and way.

One optimizer at a time, moved with ``set_device_budget``.  Going up from nothing on the device, two steps are taken at
each share and the parameters' bits compared with those of ``placement="device"`` after as many steps; coming down, the
steps are timed.  The ceilings run in the same rounds: copies both ways and the plain kernel beside a step whose state
is all on the host, ``placement="device"`` beside one whose state is all on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from experiments.bench import Case
from experiments.paging.link import BOTH, IN_PLACE, Link, size
from experiments.paging.problem import Run, adamw, away_bytes, digest, push_out, ranges, state_tensors
from experiments.workloads import Contender, Reference
from pagedopt import PagedAdamW

#: Shares of state on the device.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
STEPS = 2
DEVICE, DRIVER = "device", "managed-driver"
#: A step that begins and ends with the share on the host, as the others do.
DRIVEN = "managed-driver, pushed out again"
#: Ways whose share can be set.
PAGED: dict[str, dict[str, Any]] = {
    "mapped, staged": {"placement": "mapped", "host_access": "staged"},
    "mapped, in place": {"placement": "mapped", "host_access": "in_place"},
    "managed, in place": {"placement": "managed", "host_access": "in_place"},
}
#: Ways that have everything on the host.
ON_HOST: dict[str, dict[str, Any]] = {
    "host, staged": {"placement": "host", "host_access": "staged"},
    "host, in place": {"placement": "host", "host_access": "in_place"},
}
STEP = "step"
Rows = list[dict[str, Any]]


def part(run: Run) -> dict[str, Any]:
    """Rows of (way, share) with times and ceilings, and the digests by way."""
    rows: Rows = []
    digests: dict[str, list[str]] = {}
    link = Link(run.device, size(run))
    blocks, _ = link.best_blocks(run)
    ceilings = [Case(BOTH, link.both), Case(IN_PLACE, functools.partial(link.in_place, blocks))]
    all_near, error = _near(run, digests)
    beside = {0.0: ceilings, 1.0: [Case(DEVICE, all_near)]}
    for name, options in PAGED.items():
        with run.attempt(name):
            rows += _paged(run, name, options, beside, digests)
    for name, options in ON_HOST.items():
        with run.attempt(name):
            rows += _on_host(run, name, options, beside, digests)
    with run.attempt(DRIVER):
        digests[DRIVEN] = _driver_walk(run)
        run.free()
        rows += _driver(run)
    expected = digests[DEVICE]
    different = sorted(name for name, found in digests.items() if found != expected)
    for name in different:
        run.say(f"{name}: DIFFERENT BITS than placement='device'")
    return {
        "numel": run.work.numel, "state_bytes": run.state_bytes, "link_bytes": link.nbytes, "blocks": blocks,
        "rows": rows, "digests": digests, "different": different, "error": error,
    }  # fmt: skip


def _near(run: Run, digests: dict[str, list[str]]) -> tuple[Callable[[], object], float]:
    """The step of ``placement="device"``, whose bits all others must have; and its error against float64."""
    params = run.parameters()
    reference, optimizer = Reference(params), adamw(params, placement="device")
    error = reference.error(params, Contender(optimizer.step))
    if not error <= run.work.tolerance:
        raise AssertionError(f"placement='device' is off by {error:.2g} of its update, allowed {run.work.tolerance:g}")
    del params, reference, optimizer
    params = run.parameters()
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


def _row(run: Run, way: str, optimizer: PagedAdamW, share: float, cases: Sequence[Case]) -> dict[str, Any]:
    """Times of a step, and of what runs beside it."""
    report = optimizer.memory_report()
    away = away_bytes(report)
    precise = share == 1.0 and not run.quick  # a bar of 2 % hangs on this one
    times = run.measure(cases, rounds=40 if precise else None)
    step = times.pop(STEP)
    run.say(f"{way}, {share:.0%} on the device: {step['best'] / 1e3:,.2f} ms")
    return {
        "way": way, "share": share, "host_bytes": away, "away": away / run.state_bytes,
        "report": {"by_place": dict(report.by_place), "measured": dict(report.measured), "ring": report.ring},
        **step, "beside": times,
    }  # fmt: skip


def _paged(
    run: Run, name: str, options: dict[str, Any], beside: dict[float, list[Case]], digests: dict[str, list[str]]
) -> Rows:
    params = run.parameters()
    optimizer = adamw(params, device_budget=0, **options)

    def move(share: float) -> None:
        optimizer.set_device_budget(int(share * run.state_bytes))

    digests[name] = _walk(optimizer, params, move)
    rows = []
    for share in reversed(SHARES):
        move(share)
        rows.append(_row(run, name, optimizer, share, [Case(STEP, optimizer.step), *beside.get(share, ())]))
    return rows


def _on_host(
    run: Run, name: str, options: dict[str, Any], beside: dict[float, list[Case]], digests: dict[str, list[str]]
) -> Rows:
    params = run.parameters()
    optimizer = adamw(params, **options)
    digests[name] = _walk(optimizer, params, lambda share: None)
    return [_row(run, name, optimizer, 0.0, [Case(STEP, optimizer.step), *beside[0.0]])]


def _driver_walk(run: Run) -> list[str]:
    """Pushed out as far as each share says before each pair of steps."""
    params = run.parameters()
    optimizer = adamw(params, placement=DRIVER)

    def move(share: float) -> None:
        push_out(tail(ranges(optimizer), int((1 - share) * run.state_bytes)), run.device)

    return _walk(optimizer, params, move)


def _driver(run: Run) -> Rows:
    """The driver's paging: what was pushed out comes back with the step, and is pushed out again in the same time."""
    params = run.parameters()
    optimizer = adamw(params, placement=DRIVER)
    optimizer.step()
    rows = []
    for share in reversed(SHARES):
        away = tail(ranges(optimizer), int((1 - share) * run.state_bytes))

        def step_and_push(away: list[tuple[int, int]] = away) -> None:
            optimizer.step()
            push_out(away, run.device)

        push_out(away, run.device)
        wall = run.wall([Case(STEP, step_and_push)], rounds=6)[STEP]
        run.say(f"{DRIVEN}, {share:.0%} on the device: {wall['median'] / 1e3:,.2f} ms")
        nbytes = sum(n for _, n in away)
        rows.append({
            "way": DRIVEN, "share": share, "host_bytes": nbytes, "away": nbytes / run.state_bytes,
            "report": None, "host": wall, "wall": wall, "gpu": None, "best": wall["median"], "beside": {},
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
