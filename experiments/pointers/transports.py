"""Which transport hands a list of pointers to a kernel fastest, for one list and for AdamW's four?

Answer (H200, 2026-11): where the list is rewritten, managed memory with two pieces of advice costs at most 5 % more
than the fastest up to 1,000 tensors, and up to 42 % beyond.  Our copy and one launch beats structs of 4 KB from 10
tensors on, the least that was tried; torch's own copies do at no size.

Every transport first updates its lists rightly; all step in interleaved rounds, the list rewritten before every step,
with new hyperparameters only, or unchanged.  Every update is counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.harness.plot import Plot
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Text, number, times
from experiments.works.tiny_lists import COPIES, TRANSPORTS
from experiments.works.ways import MODES, PANELS, on_grid, sweep, traffic

LISTS = {1: "1 list", 4: "4 lists"}
STRUCTS, OURS = "struct 4 KB", "memcpy"


def measure(run: Run) -> Iterator[Row]:
    """A row per number of lists, count, mode and way: times, launches and explicitly copied bytes per step."""
    if run.device.type == "cpu":
        run.left_out.append("all of them: need a GPU; the CPU walks the table in place (shown as Numba)")
    for lists in run.each(LISTS):
        yield from sweep(run, TRANSPORTS | COPIES, lists)


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
        if any(row["way"] in COPIES for row in rows):
            found += [f"- With {name}, {line}" for line in worth(rows.where(lists=lists))]
    return "\n".join(found)


def break_even(rows: Rows, way: str) -> tuple[int | None, int | None]:
    """Of the counts that were measured, the last at which many launches of structs are faster than a copy and one
    launch, and the first from which on they are not; None: there is no such count."""
    wall = {(row["way"], row["count"]): row["wall"]["median"] for row in rows.where(mode="rewritten")}
    counts = sorted(count for name, count in wall if name == way and (STRUCTS, count) in wall)
    lost = [count for count in counts if wall[way, count] >= wall[STRUCTS, count]]
    won = [count for count in counts if count > max(lost, default=0)]
    return max(lost, default=None), min(won, default=None)


def worth(rows: Rows) -> Iterator[str]:
    """From how many tensors on a copy and one launch take less than launches of 4 KB each."""
    for way in (OURS, *COPIES):
        lost, won = break_even(rows, way)
        if lost is None and won is None:
            continue
        copy = f"{way}, a copy and one launch,"
        if won is None:
            yield f"{copy} takes longer than structs of 4 KB at every size, {lost:,} tensors too."
        else:
            still = f", not yet at {lost:,}" if lost else ", the least that was measured"
            yield f"{copy} beats structs of 4 KB from {won:,} tensors on{still}."


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
