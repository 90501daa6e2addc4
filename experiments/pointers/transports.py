"""Which transport hands a list of pointers to a kernel fastest, for one list and for AdamW's four?

Answer (H200, 2026-11): where the list is rewritten, managed memory with two pieces of advice costs at most 5 % more
than the fastest up to 1,000 tensors, and up to 42 % beyond.  Our copy and one launch beats structs of 4 KB from 10
tensors on, the least that was tried; torch's own copies do at no size.

Every transport first updates its lists rightly; all step in interleaved rounds, the list rewritten before every step,
with new hyperparameters only, or unchanged.  Every update is counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Page, Row, Rows, Run, number
from experiments.works import ways
from experiments.works.tiny_lists import COPIES, TRANSPORTS

MEASURES = ("kernels", "launch", "tables", "transports")
AN_OPTIMIZER = 4
LISTS = {1: "1 list", AN_OPTIMIZER: "4 lists"}
STRUCTS, OURS = "struct 4 KB", "memcpy"


def measure(run: Run) -> Iterator[Row]:
    """A row per number of lists, count, mode and way: times, launches and explicitly copied bytes per step."""
    if run.device.type == "cpu":
        run.left_out.append("all of them: need a GPU; the CPU walks the table in place (shown as Numba)")
    for lists in run.each(LISTS):
        yield from ways.sweep(run, TRANSPORTS | COPIES, lists)


def derive(rows: Rows) -> Rows:
    """Those that may need several launches, marked."""
    return Rows({**row, "in_structs": row["way"].startswith("struct")} for row in rows)


def managed_over_best(rows: Rows) -> dict[int, float]:
    """For each count, wall time of managed over that of the fastest transport, the list being rewritten."""
    known = ways.walls(rows.where(mode="rewritten"))
    return {count: wall["managed"] / min(wall.values()) for count, wall in known.items() if "managed" in wall}


def worst(rows: Rows) -> tuple[float, str] | None:
    """The count at which managed memory is the worst choice decides."""
    ratios = managed_over_best(rows)
    if not ratios:
        return None
    count = max(ratios, key=ratios.__getitem__)
    return ratios[count], f" (worst at {count:,} tensors)"


def break_even(rows: Rows, way: str) -> tuple[int | None, int | None]:
    """Of the counts that were measured, the last at which many launches of structs are faster than a copy and one
    launch, and the first from which on they are not; None: there is no such count."""
    known = ways.walls(rows.where(mode="rewritten"))
    faster = {count: wall[way] < wall[STRUCTS] for count, wall in known.items() if {way, STRUCTS} <= wall.keys()}
    lost = max((count for count in faster if not faster[count]), default=None)
    return lost, min((count for count in faster if count > (lost or 0)), default=None)


def sentences(rows: Rows) -> str:
    """Of an optimizer's four lists."""
    return "\n".join(f"- With {LISTS[AN_OPTIMIZER]}, {said}" for said in worth(rows.where(lists=AN_OPTIMIZER)))


def worth(rows: Rows) -> Iterator[str]:
    """What managed memory costs, and from how many tensors on a copy and one launch beat launches of 4 KB each."""
    if ratios := managed_over_best(rows):
        yield (
            f"rewritten before every step, managed memory costs {number(min(ratios.values()))} to "
            f"{number(max(ratios.values()))} x the fastest transport ({min(ratios):,} to {max(ratios):,} tensors)."
        )
    for way in (OURS, *COPIES):
        lost, won = break_even(rows, way)
        copy = f"{way}, a copy and one launch,"
        if won is not None:
            still = f", not yet at {lost:,}" if lost else ", the least that was measured"
            yield f"{copy} beats structs of 4 KB from {won:,} tensors on{still}."
        elif lost is not None:
            yield f"{copy} takes longer than structs of 4 KB at every size, {lost:,} tensors too."


def tables(page: Page, rows: Rows, name: str) -> None:
    """Times, of an optimizer's four lists in each mode, and how often is launched."""
    rewritten = rows.where(mode="rewritten")
    for mode, words in ways.MODES.items():
        if name == LISTS[AN_OPTIMIZER] or mode == "rewritten":
            on = page if name == LISTS[AN_OPTIMIZER] and mode == "rewritten" else page.detail
            ways.on_grid(on, f"transports, {name}, {words}: wall µs", rows.where(mode=mode), "wall")
    ways.on_grid(page.detail, f"transports, {name}, rewritten: GPU µs", rewritten, "gpu")
    if name == LISTS[AN_OPTIMIZER]:
        title = f"launches, {name}, rewritten; of all other transports it is one"
        ways.on_grid(page.detail, title, rewritten.where(in_structs=True), "launches")


TITLE = "A step over N tiny tensors, four lists of pointers rewritten before it, by how they reach the kernel"


def report(page: Page, rows: Rows) -> None:
    """Tables, what follows, a picture, and what is held to a limit."""
    for lists, name in LISTS.items():
        tables(page, rows.where(lists=lists), name)
    page.say(sentences(rows), "answer")
    page.picture("transports", rows.where(lists=4), ways.PANELS, TITLE)
    for lists, name in LISTS.items():
        page.bar(f"managed ÷ best transport, list rewritten, {name}", rows.where(lists=lists), worst,
            at_most=1.15, unit="x")  # fmt: skip
