"""What do 16 short LayerNorms cost one by one, all at once, compiled, as a graph, and as a list of pointers?

Answer (H200, 2026-11): 1,187 µs one by one, 469 all at once, 443 compiled with combo kernels, 548 as a list of
pointers, 191 as a graph and 77 as a graph of the list: of these kernels need 26 to 96, and the rest is launching.

The work is the puzzlers' (:mod:`experiments.works.slices`).  Kernels, launches, operators and gaps are counted in a
trace; times are taken without it.  16 MiB of input lie in an H200's L2, so it is done again with 256 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.harness.plot import Plot
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table, number
from experiments.harness.time import Case
from experiments.launch import timeline
from experiments.works.dispatch import dispatched
from experiments.works.slices import (
    COMBINED,
    COMBO,
    COMPILED,
    GRAPH,
    LIST,
    LIST_GRAPH,
    OVERHEAD,
    SPLIT,
    WIDE,
    Slices,
    Way,
    made,
)
from experiments.works.trace import Counts, counted

#: Of the puzzlers' trace on an A100: kernels, and µs from the first to the last.
A100 = {SPLIT: (36, 1613), COMBINED: (5, 191), COMPILED[SPLIT]: (19, 634), COMPILED[COMBINED]: (4, 157)}
#: And µs of one kernel.
A100_EACH = {
    SPLIT: {"LayerNorm": 6, "tanh": 4, "stack": 13, "copy": 4, "linear": 8, "ReLU": 3},
    COMBINED: {"LayerNorm": 43, "tanh": 8, "copy": 4, "linear": 8, "ReLU": 3},
    COMPILED[SPLIT]: {"Triton": 5},
    COMPILED[COMBINED]: {"copy": 4, "linear": 8},
}
BATCH = 1024


def measure(run: Run) -> Iterator[Row]:
    """A row per way: times, counts, its error, its trace; and one per kind of kernel that it launches."""
    run.rounds, run.seconds = run.size((100, 3.0), (3, 0.2))
    for batch in run.each(run.size((BATCH, 16 * BATCH) if run.device.type == "cuda" else (BATCH,), (4,))):
        yield from of_batch(run, batch)
        forget()


def forget() -> None:
    """Let torch.compile forget what it made: it keeps eight versions of a function, and no more."""
    import torch

    torch._dynamo.reset()


def of_batch(run: Run, batch: int) -> Iterator[Row]:
    """Every way over slices of so many rows."""
    work = Slices(batch, run.device)
    ways, about = {}, {}
    for name, way, error in made(work, run):
        ways[name] = way
        about[name] = {"error": error, **eager_operators(name, way), **seen(run, name, way)}
    repeats = 4 if run.device.type == "cuda" else 1
    timings = run.measure([Case(name, way, repeats=repeats) for name, way in ways.items()])
    common = {"batch": batch, "device": run.device.type, "bytes": work.x.nbytes}
    for name, timing in timings.items():
        counts = about[name].pop("counts", None)
        drawn = {"drawn": counts is not None, "trace": timeline.packed(counts.trace) if counts else ""}
        yield {"of": "way", **common, "case": name, **about[name], **drawn, **timing}
        for kernels in timeline.by_kind(counts.trace) if counts else ():
            yield {"of": "kernels", **common, "case": name, **kernels}
    run.say(f"{batch:,} rows a slice: {len(timings)} ways")


def eager_operators(name: str, way: Way) -> dict[str, int]:
    """What torch dispatches; of a compiled function that is nobody's."""
    return {"dispatched": dispatched(way).operators} if name in (SPLIT, COMBINED, LIST) else {}


def seen(run: Run, name: str, way: Way) -> dict[str, Any]:
    """What a trace shows, and the trace."""
    if run.device.type == "cpu" and name not in (SPLIT, COMBINED):
        return {}  # there are operators to be seen, and nothing else
    with run.attempt(f"trace of {name}", (Exception,)):
        counts: Counts = counted(way)
        gaps = sorted(gap.length for gap in counts.gaps)
        return {**counts.as_dict(), "gap_each": gaps[len(gaps) // 2] if gaps else None, "counts": counts}
    return {}


def derive(rows: Rows) -> Rows:
    """Speed over split_stack, wall times against combined, what the A100 had."""
    found = Rows()
    for group in rows.groups("batch"):
        walls = {row["case"]: row["wall"]["median"] for row in group.where(of="way")}
        for row in group:
            if row["of"] == "kernels":
                known_each = A100_EACH.get(row["case"], {}) if row["batch"] == BATCH else {}
                found.append({**row, "a100": known_each.get(row["kind"])})
                continue
            wall, count = walls[row["case"]], row.get("kernels") if row["device"] == "cuda" else None
            known = A100.get(row["case"]) if row["batch"] == BATCH else None
            found.append({
                **row,
                "kernels": count,
                "faster": walls[SPLIT] / wall if SPLIT in walls else None,
                "of_combined": wall / walls[COMBINED] if COMBINED in walls else None,
                "a100": f"{known[0]} / {known[1]:,}" if known else "",
                "a100_faster": f"{A100[SPLIT][1] / known[1]:.1f} x" if known else "",
                "off": abs(count - known[0]) if count is not None and known else None,
            })  # fmt: skip
    return found


def wall(row: Row) -> str:
    """Median, and how far it spreads."""
    return "{} ({} to {})".format(*(number(row["wall"][name]) for name in ("median", "p10", "p90")))


def error(row: Row) -> str:
    """Against float64."""
    return f"{row['error']:.1e}"


WAYS = {"of": "way"}
TABLES = [
    Table("16 slices of {batch:,} x 256, {device}", by=("batch",), where=WAYS, columns={
        "way": "case", "operators": "operators", "launches": "launches", "kernels": "kernels", "busy µs": "busy_us",
        "median gap µs": "gap_each", "first to last µs": "span_us", "host µs": "host", "GPU µs": "gpu",
        "wall µs (p10 to p90)": wall, "faster": lambda row: f"{row['faster']:.2f} x" if row["faster"] else "-",
        "A100: kernels / µs": "a100", "A100: faster": "a100_faster", "error": error,
    }),
    Table("kernels of {case}, {batch:,} rows a slice", by=("batch", "case"), where={"of": "kernels"}, columns={
        "kernel": "kind", "launched": "count", "µs each": "each", "µs in all": "all", "A100, µs each": "a100",
    }),
]  # fmt: skip


def fewest(rows: Rows) -> float | None:
    """Kernels of split_stack where torch may put as many side by side as it likes."""
    counts = [row["kernels"] for row in rows if row["case"].startswith(COMPILED[SPLIT]) and COMBO in row["case"]]
    return min((count for count in counts if count is not None), default=None)


def slower(rows: Rows) -> float | None:
    """split_stack ÷ combined, wall."""
    return rows.number("of_combined", case=SPLIT)


GPU: dict[str, Any] = {"of": "way", "batch": BATCH, "device": "cuda"}
BARS = [
    Bar("split_stack, kernels more or less than 36", "off", at_most=0, case=SPLIT, **GPU),
    Bar("combined, kernels more or less than 5", "off", at_most=0, case=COMBINED, **GPU),
    Bar("split_stack compiled, kernels", "kernels", at_most=19, case=COMPILED[SPLIT], **GPU),
    Bar("combined compiled, kernels", "kernels", at_most=4, case=COMPILED[COMBINED], **GPU),
    Bar("split_stack compiled with combo kernels, kernels", fewest, at_most=4, **GPU),
    Bar("split_stack ÷ combined, wall", slower, at_least=4, unit="x", **GPU),
    Bar("pointer list ÷ combined, wall", "of_combined", at_most=1, unit="x", case=LIST, **GPU),
]

#: In the picture; what is compiled with combo kernels looks like what is not.
DRAWN = (SPLIT, COMPILED[SPLIT], WIDE, GRAPH, OVERHEAD, COMBINED, COMPILED[COMBINED], LIST, LIST_GRAPH)


def draw(figure: Any, rows: Rows) -> None:
    """The traces of the smallest batch, those that are to be compared above each other."""
    smallest = rows.where(of="way", batch=min(rows.values("batch")))
    timeline.draw(figure, Rows(row for name in DRAWN for row in smallest.where(case=name)))


PLOTS: list[Plot] = [Plot("traces", draw)]
