"""What must be reached, and what the parts that were measured say to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.paging.hidden import IN_PLACE as HIDDEN
from experiments.paging.link import BOTH, IN_PLACE
from experiments.paging.rivals import OURS, RIVAL, SAME
from experiments.paging.spike import UNPAGED
from experiments.paging.state_file import BAR_SHARE
from experiments.paging.sweep import DEVICE, ON_HOST, PAGED
from experiments.report import Bar

Row = Mapping[str, Any]
#: Shares of state on the host at which the time is held to a straight line.
LINE = (0.1, 0.25, 0.5, 0.75)


def bars(result: Mapping[str, Any]) -> list[Bar]:
    """Every bar; those of parts that were not measured have no number."""
    known = result["parts"]

    def rows(part: str) -> Sequence[Row]:
        return known.get(part, {}).get("rows", ())

    sweep, crossing = rows("sweep"), rows("bytes")
    found = [*on_host(sweep, known.get("sweep", {}))]
    name = "speed over bitsandbytes PagedAdamW32bit, same start and end"
    found.append(Bar(name, over_rival(rows("rivals")), 3.5, "x", True))
    for way in PAGED:
        name = f"{way}: time ÷ straight line in the share away, worst of 10 to 75 %"
        found.append(Bar(name, worst_of_line(sweep, way), 1.05, "x"))
    for way in PAGED:
        name = f"{way}: budget covers everything, time over placement='device'"
        found.append(Bar(name, all_near(sweep, way), 2, "%"))
    for way in PAGED:
        name = f"{way}: bytes that crossed ÷ bytes that had to, worst share"
        found.append(Bar(name, worst_crossing(crossing, way), 1.01, "x"))
    # The driver gives memory in pieces of 2 MiB, and its own page tables for the state's pages are in the reading.
    name = "device memory taken beyond budget and ring, worst way and share"
    found.append(Bar(name, worst_memory(rows("memory")), 2, "MiB"))
    for placement in HIDDEN:
        name = f"in place behind matrix products, {placement}, 8 blocks: hidden"
        found.append(Bar(name, percent(hidden(rows("hidden"), placement)), 85, "%", True))
    name = "ways whose bits differ from placement='device'"
    found.append(Bar(name, count(known.get("sweep"), "different"), 0, ""))
    return [*found, *of_spike(known.get("spike")), *of_file(known.get("cpu"))]


def percent(share: float | None) -> float | None:
    """A share in percent."""
    return None if share is None else 100 * share


def count(part: Mapping[str, Any] | None, what: str) -> float | None:
    """How many there are in a part that was measured."""
    return None if part is None else len(part[what])


def at(rows: Sequence[Row], way: str, share: float) -> Row | None:
    """The row of a way and a share on the device."""
    return next((row for row in rows if row["way"] == way and row["share"] == share), None)


def on_host(rows: Sequence[Row], sweep: Mapping[str, Any]) -> Iterable[Bar]:
    """All state on the host: bytes a second, as a share of the ceiling that ran in the same rounds."""
    for way in (*PAGED, *ON_HOST):
        staged = way.endswith("staged")
        name = "the link's two-way rate" if staged else "a plain kernel in place"
        yield Bar(f"all state on the host, {way}, share of {name}", percent(share_of_ceiling(rows, way, sweep)),
                  95 if staged else 97, "%", True)  # fmt: skip


def share_of_ceiling(rows: Sequence[Row], way: str, sweep: Mapping[str, Any]) -> float | None:
    """Rate of the step's bytes (up and down) over that of the ceiling, whose case moves ``link_bytes`` or twice that.

    In place, the plain kernel reads and writes two copies' worth.
    """
    row = at(rows, way, 0.0)
    ceiling = BOTH if way.endswith("staged") else IN_PLACE
    if row is None or ceiling not in row["beside"]:
        return None
    moved = sweep["link_bytes"] * (1 if ceiling == BOTH else 2)
    return float((row["host_bytes"] / row["best"]) / (moved / row["beside"][ceiling]["best"]))


def worst_of_line(rows: Sequence[Row], way: str) -> float | None:
    """The largest time over x · (time with all away) + (time with nothing away), x the share that is away."""
    found = [ratio for x in LINE if (ratio := over_line(rows, way, round(1 - x, 2))) is not None]
    return max(found) if len(found) == len(LINE) else None


def over_line(rows: Sequence[Row], way: str, share: float) -> float | None:
    """The time at a share on the device over what a straight line has there."""
    row, away, near = at(rows, way, share), at(rows, way, 0.0), at(rows, way, 1.0)
    if row is None or away is None or near is None:
        return None
    return float(row["best"] / (row["away"] * away["best"] + near["best"]))


def all_near(rows: Sequence[Row], way: str) -> float | None:
    """How much longer (%) a step takes than with ``placement="device"`` in the same rounds."""
    row = at(rows, way, 1.0)
    if row is None or DEVICE not in row["beside"]:
        return None
    return float(100 * (row["best"] / row["beside"][DEVICE]["best"] - 1))


def over_rival(rows: Sequence[Row]) -> float | None:
    """bitsandbytes' wall time over ours, both from the host and back to the host."""
    times = {(row["name"], row["what"]): row["wall"]["median"] for row in rows}
    ours, theirs = times.get((OURS, "step")), times.get((RIVAL, SAME))
    return None if ours is None or theirs is None else float(theirs / ours)


def worst_crossing(rows: Sequence[Row], way: str) -> float | None:
    """The largest ratio of a way over the shares at which something had to cross."""
    return max((row["ratio"] for row in rows if row["way"] == way and row["ratio"] is not None), default=None)


def worst_memory(rows: Sequence[Row]) -> float | None:
    """The most MiB of the device that were taken and not allowed; below zero if none were."""
    return max(((row["device_extra"] - row["allowed"]) / 2**20 for row in rows), default=None)


def hidden(rows: Sequence[Row], placement: str) -> float | None:
    """The share hidden on 8 blocks."""
    wanted = (placement, "in_place", 8)
    return next((r["hidden"] for r in rows if (r["placement"], r["access"], r["blocks"]) == wanted), None)


def of_spike(part: Mapping[str, Any] | None) -> Iterable[Bar]:
    """The training loop on a card that is too small for its large batches."""
    slower = max(part["slowdown"].values(), default=None) if part else None
    helpless = part is not None and part["helpless"].startswith("out of memory")
    finished = None if part is None else float(len(part["slowdown"])) if helpless else 0.0
    yield Bar("spikes: loops that finish where the card is too small without spilling", finished, 2, "", True)
    yield Bar("spikes: the other steps, time over unpaged", None if slower is None else 100 * (slower - 1), 3, "%")
    differ = None if part is None else float(not part["same"])
    yield Bar(f"spikes: losses that differ from '{UNPAGED}'", differ, 0, "")


def of_file(part: Mapping[str, Any] | None) -> Iterable[Bar]:
    """State in a file on a CPU."""
    row = next((r for r in part["rows"] if r["share"] == BAR_SHARE), None) if part else None
    beyond = None if row is None else (row["resident"] - row["budget"]) / 2**20
    yield Bar("CPU, state file, a quarter in RAM: resident beyond the budget", beyond, 64, "MiB")
    yield Bar("CPU, state file: budgets whose bits differ from all in RAM", count(part, "different"), 0, "")
