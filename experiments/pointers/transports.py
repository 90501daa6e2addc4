"""Which transport hands a list of pointers to a kernel fastest, for one list and for AdamW's four?

Answer (H200, 2026-11): where the list is rewritten, managed memory with two pieces of advice costs at most 13 % more
than the fastest at every size.

Every transport first updates its lists rightly; all step in interleaved rounds, the list rewritten before every step,
with new hyperparameters only, or unchanged.  Every update is counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.harness.plot import Plot
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Text, number, times
from experiments.works.tiny_lists import TRANSPORTS
from experiments.works.ways import MODES, PANELS, on_grid, sweep, traffic

LISTS = {1: "1 list", 4: "4 lists"}


def measure(run: Run) -> Iterator[Row]:
    """A row per number of lists, count, mode and way: times, launches and explicitly copied bytes per step."""
    if run.device.type == "cpu":
        run.left_out.append("all of them: need a GPU; the CPU walks the table in place (shown as Numba)")
    for lists in run.each(LISTS):
        yield from sweep(run, TRANSPORTS, lists)


def managed_over_best(rows: Rows) -> dict[int, float]:
    """For each count, wall time of managed over that of the fastest transport, the list being rewritten."""
    found = {}
    for group in rows.where(mode="rewritten").groups("count"):
        wall = {row["way"]: row["wall"]["median"] for row in group}
        if "managed" in wall:
            found[group[0]["count"]] = wall["managed"] / min(wall.values())
    return found


def worst(rows: Rows) -> tuple[float, str] | None:
    """The count at which managed memory is the worst choice decides."""
    ratios = managed_over_best(rows)
    if not ratios:
        return None
    count = max(ratios, key=ratios.__getitem__)
    return ratios[count], f" (worst at {count:,} tensors)"


def sentences(rows: Rows) -> str:
    """A line per number of lists."""
    found = []
    for lists, name in LISTS.items():
        if ratios := managed_over_best(rows.where(lists=lists)):
            found.append(
                f"- With {name}, rewritten before every step, managed memory costs {number(min(ratios.values()))} to "
                f"{number(max(ratios.values()))} x the fastest transport ({min(ratios):,} to {max(ratios):,} tensors)."
            )
    return "\n".join(found)


TABLES = [
    table
    for lists, name in LISTS.items()
    for table in (
        *(on_grid(f"transports, {name}, {words}: host / GPU / wall µs", times, lists=lists, mode=mode)
          for mode, words in MODES.items()),
        on_grid(f"transports, {name}, rewritten: launches, bytes copied explicitly", traffic, lists=lists,
                mode="rewritten"),
    )
]  # fmt: skip
BARS = [
    Bar(f"managed ÷ best transport, list rewritten, {name}", worst, at_most=1.15, unit="x", lists=lists)
    for lists, name in LISTS.items()
]
PLOTS = [Plot("transports", PANELS, "A step over N tiny tensors, four lists of pointers", where={"lists": 4})]
TEXTS = [Text("answer", sentences)]
