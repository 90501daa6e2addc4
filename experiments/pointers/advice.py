"""What advice does managed memory need, that holds a list of pointers?

Answer (H200, 2026-11): preferred on the host, accessed by the device, or both: 1.2 to 1.5 ms to rewrite 65,536
pointers; 2.6 without, when pages migrate on every rewrite, and 6.2 as read mostly.  Each table has
pages of its own: short ones that shared a page took each other's advice.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Page, Row, Rows, Run, number
from experiments.works import ways
from experiments.works.tiny_lists import ADVICE
from pagedopt.system.driver import capabilities

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "transports")


def measure(run: Run) -> Iterator[Row]:
    """A row per advice, count and mode, for one list."""
    if capabilities(run.device.index).concurrent_managed:
        yield from ways.sweep(run, ADVICE, 1)
    else:
        run.leave_out("this GPU has no concurrent managed access (concurrentManagedAccess = 0)")


def sentence(rows: Rows) -> str | None:
    """Advice in the order of its cost for the longest list."""
    if not (known := ways.walls(rows.where(mode="rewritten"))):
        return None
    most = max(known)
    order = ", ".join(f"{way} {number(us)} µs" for way, us in sorted(known[most].items(), key=lambda item: item[1]))
    return f"- Rewriting {most:,} pointers in managed memory, by advice: {order}."


def sharing(rows: Rows) -> float:
    """Rows of tables that stood in a page with tables of other advice."""
    return float(sum(bool(row["beside"]) for row in rows))


TITLE = "A step over N tiny tensors, its list rewritten before it in managed memory, by advice"


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, a picture, and what is held to a limit."""
    for mode, name, clock in (
        ("rewritten", "wall", "wall"),
        ("rewritten", "GPU", "gpu"),
        ("new scalars", "wall", "wall"),
    ):
        on = page if name == "wall" and mode == "rewritten" else page.detail
        ways.on_grid(on, f"managed memory by advice, 1 list, {ways.MODES[mode]}: {name} µs",
            rows.where(mode=mode), clock)  # fmt: skip
    page.say(sentence(rows), "answer")
    page.picture("advice", rows, ways.PANELS, TITLE)
    page.bar("tables in a page with another advice's", rows, sharing, at_most=0)
