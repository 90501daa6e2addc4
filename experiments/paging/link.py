"""What do the link and the memory behind it give, in copies and to a plain kernel that works in place?

Answer (H200, 2026-11): 55 GB/s in one direction, 102 in both at once, 85 to a kernel that reads and writes host
memory in place; copies within the device's memory reach 4,260.  These are the ceilings that steps over spilled state
are held to, but each bar divides by a ceiling that ran in the same rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from experiments.harness.columns import ms
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Table, Text
from experiments.harness.time import Case
from experiments.works.link import BOTH, DOWN, HBM, IN_PLACE, UP, Link
from experiments.works.paged import pace

NEEDS_GPU = True
CEILING, GRID = "ceiling", "grid of the plain kernel"
#: How many times the bytes of one copy each reads and writes.
MOVED = {UP: 1, DOWN: 1, BOTH: 2, IN_PLACE: 4, HBM: 4}


def measure(run: Run) -> Iterator[Row]:
    """A row per grid of the plain kernel, then one per ceiling: times, and the bytes that are moved in all."""
    pace(run)
    link = Link(run)
    best, grids = link.best_blocks(run)
    for blocks, times in grids.items():
        yield {"kind": GRID, "what": IN_PLACE, "blocks": int(blocks), **_moved(IN_PLACE, link.nbytes), **times}
    other = torch.empty_like(link.near)
    cases = [Case(name, copy) for name, copy in link.copies().items()]
    cases += [Case(IN_PLACE, functools.partial(link.in_place, best)), Case(HBM, lambda: other.copy_(link.near))]
    for name, times in run.measure(cases, seconds=2.0).items():
        grid = {"blocks": best} if name == IN_PLACE else {}
        yield {"kind": CEILING, "what": name, **grid, **_moved(name, link.nbytes), **times}


def _moved(name: str, nbytes: int) -> dict[str, int]:
    return {"copy_bytes": nbytes, "moved": MOVED[name] * nbytes}


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    nbytes, best = part["bytes"], {IN_PLACE: {"blocks": part["blocks"]}}
    grids = [{"kind": GRID, "what": IN_PLACE, "blocks": int(blocks), **_moved(IN_PLACE, nbytes), **times}
             for blocks, times in part["grids"].items()]  # fmt: skip
    return grids + [{"kind": CEILING, "what": name, **best.get(name, {}), **_moved(name, nbytes), **times}
                    for name, times in part["times"].items()]  # fmt: skip


def rate(row: Row) -> float:
    """GB/s, all directions together."""
    return float(row["moved"] / row["best"] / 1e3)


def ceilings(rows: Rows) -> str | None:
    """One sentence with the rates that the bars divide by."""
    rates = ", ".join(f"{row['what']} {rate(row):,.1f}" for row in rows.where(kind=CEILING))
    return f"GB/s: {rates}. ({BOTH} and in place: the sum of both directions.)" if rates else None


def title(rows: Rows) -> str:
    """How much is copied."""
    return f"link and memory, {rows[0]['copy_bytes'] / 2**30:.3g} GiB each way"


TABLES = [
    Table(title, where={"kind": CEILING}, columns={
        "what": lambda row: f"{row['what']} ({row['blocks']} blocks)" if "blocks" in row else row["what"],
        "GB/s": rate, "ms": ms("best"),
    })
]  # fmt: skip
TEXTS = [Text("ceilings", ceilings)]
