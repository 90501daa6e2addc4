"""What do the link and the memory behind it give, in copies and to a plain kernel that works in place?

Answer (H200, 2026-11): 55 GB/s in one direction, 102 in both at once, 85 to a kernel that reads and writes host
memory in place; copies within the device's memory reach 4,260.  These are the ceilings that steps over spilled state
are held to, but each bar divides by a ceiling that ran in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.clock import Case
from experiments.columns import gb_per_s, ms
from experiments.comparing import best
from experiments.lab import Page, Row, Rows, Run
from experiments.works.in_place import InPlace
from experiments.works.link import IN_PLACE, MOVES
from experiments.works.paged import pace

NEEDS_GPU = True
CEILING, GRID = "ceiling", "grid of the plain kernel"
HBM = "HBM copy"


def measure(run: Run) -> Iterator[Row]:
    """A row per grid of the plain kernel, then one per ceiling: times, and the bytes that are moved in all."""
    pace(run)
    link = InPlace.of(run)
    moved = {name: sum(copies) * link.nbytes for name, copies in MOVES.items()} | {HBM: 4 * link.nbytes}
    blocks, grids = link.best_blocks(run)
    for row in grids:
        yield {"kind": GRID, "what": IN_PLACE, "copy_bytes": link.nbytes, "moved": moved[IN_PLACE], **row}
    other = torch.empty_like(link.near)
    cases = [*link.cases(blocks), Case(HBM, lambda: other.copy_(link.near))]
    for name, times in run.measure(cases, seconds=2.0).items():
        grid = {"blocks": blocks} if name == IN_PLACE else {}
        yield {"kind": CEILING, "what": name, "copy_bytes": link.nbytes, "moved": moved[name], **grid, **times}


RATE = gb_per_s("moved", best)


def what(row: Row) -> str:
    """What was timed, and on how many blocks."""
    return f"{row['what']} ({row['blocks']} blocks)" if "blocks" in row else str(row["what"])


def report(page: Page, rows: Rows) -> None:
    """A table of the rates that the bars divide by."""
    page.table(lambda rows: f"link and memory, {rows[0]['copy_bytes'] / 2**30:.3g} GiB each way (both ways: the sum)",
        rows.where(kind=CEILING), {"what": what, "GB/s": RATE, "ms": ms(best)})  # fmt: skip
