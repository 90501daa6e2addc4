"""What do 16 short LayerNorms cost one by one, all at once, compiled, as a graph, and as a list of pointers?

Answer: see notes/launch_overhead.md.

The work is the puzzlers' (:mod:`experiments.works.slices`).  Kernels, launches, operators and gaps are counted in a
trace; times are taken without it.  16 MiB of input lie in an H200's L2, so it is done again with 256 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from experiments.kept import chosen_device
from experiments.lab import (
    Case,
    Column,
    Page,
    Row,
    Rows,
    Run,
    error,
    number,
    number_in,
    over,
    ratio,
    spread,
)
from experiments.launch import timeline
from experiments.works import slices
from experiments.works.slices import COMBINED, COMBO, COMPILED, LIST, SPLIT
from experiments.works.trace import counted, counted_apart

MEASURES = ("launch", "tables")
BATCH = 1024


class Published(NamedTuple):
    """Of the puzzlers' trace on an A100: kernels, µs from the first to the last, and µs of one kernel of a kind."""

    kernels: int
    span: int
    each: Mapping[str, int]


A100 = {
    SPLIT: Published(36, 1613, {"LayerNorm": 6, "tanh": 4, "stack": 13, "copy": 4, "linear": 8, "ReLU": 3}),
    COMBINED: Published(5, 191, {"LayerNorm": 43, "tanh": 8, "copy": 4, "linear": 8, "ReLU": 3}),
    COMPILED[SPLIT]: Published(19, 634, {"Triton": 5}),
    COMPILED[COMBINED]: Published(4, 157, {"copy": 4, "linear": 8}),
}


def measure(run: Run) -> Iterator[Row]:
    """A row per way: times, counts, its error, its trace; and one per kind of kernel that it launches."""
    run.rounds, run.seconds = run.size((100, 3.0), (3, 0.2))
    on_cpu = run.device.type == "cpu"
    for batch in run.each(run.size((BATCH,) if on_cpu else (BATCH, 16 * BATCH), (4,))):
        work = slices.Slices(batch, run.device)
        about = {"batch": batch, "device": run.device.type, "bytes": work.x.nbytes}
        cases, errors = [], {}
        for name, way, off in slices.made(work, run):
            errors[name] = off
            cases.append(Case(name, way, repeats=1 if on_cpu else 4))
        rows = list(run.time(cases, of="way", **about))
        slices.forget()
        found = counted_apart(run, traces, str(run.device), batch, run.quick, by=["case"])
        for row in rows:
            more = found.get((row["case"],), {})
            kinds = more.pop("kinds", [])
            yield {**row, "error": errors[row["case"]], "trace": "", **more}
            yield from ({"of": "kernels", **about, "case": row["case"], **kernels} for kernels in kinds)


def traces(device: str, batch: int, quick: bool) -> Iterator[Row]:
    """In a process of its own: what a trace of each way counts, as text, and its kernels by kind."""
    run = Run(chosen_device(device), quick)
    for name, way, _ in slices.made(slices.Slices(batch, run.device), run):
        if run.device.type == "cpu" and name not in (SPLIT, COMBINED):
            continue  # there are operators to be seen, and nothing else
        with run.attempt(f"trace of {name}", (Exception,)):
            counts = counted(way)
            kinds = list(timeline.by_kind(counts.trace))
            yield {"case": name, **counts.as_dict(), "trace": timeline.packed(counts.trace), "kinds": kinds}


def derive(rows: Rows) -> Rows:
    """Speed over split_stack, wall times against combined, what the A100 had."""
    found = Rows()
    for row in rows:
        known = A100.get(row["case"]) if row["batch"] == BATCH else None
        if row["of"] == "kernels":
            found.append({**row, "a100": known.each.get(row["kind"]) if known else None})
            continue
        beside = {way["case"]: way["wall"] for way in rows.where(of="way", batch=row["batch"])}
        split, combined = over(beside.get(SPLIT), row["wall"]), over(row["wall"], beside.get(COMBINED))
        row = {**row, "clock": "wall", "faster": split, "of_combined": combined, "a100": "", "a100_faster": ""}
        if row["device"] == "cpu":
            row["kernels"] = None
        if known:
            off = None if row.get("kernels") is None else abs(row["kernels"] - known.kernels)
            faster = f"{A100[SPLIT].span / known.span:.1f} x"
            row |= {"a100": f"{known.kernels} / {known.span:,}", "a100_faster": faster, "off": off}
        found.append({**row, "drawn": row["batch"] == rows[0]["batch"] and bool(row["trace"])})
    return found


def each(row: Row) -> str:
    """Of a kind of kernel: how many, and how long one takes; on an A100, too."""
    return f"{row['count']} x {number(number_in(row, 'each'))}" + (f" ({row['a100']})" if row["a100"] else "")


def kind(name: str) -> str:
    """What a template's name begins with says nothing."""
    return "another of torch's" if "::" in name else name


def fewest(rows: Rows) -> float | None:
    """Kernels of split_stack where torch may put as many side by side as it likes."""
    counts = [row["kernels"] for row in rows if row["case"].startswith(COMPILED[SPLIT]) and COMBO in row["case"]]
    return min((count for count in counts if count is not None), default=None)


GPU: dict[str, Any] = {"of": "way", "batch": BATCH, "device": "cuda"}
#: In the picture, those above each other that are to be compared; what combo kernels fuse looks like what is compiled.
SPLITS = (SPLIT, COMPILED[SPLIT], slices.WIDE, slices.GRAPH, slices.OVERHEAD)
DRAWN = (*SPLITS, COMBINED, COMPILED[COMBINED], LIST, slices.LIST_GRAPH)
CLOCK = "µs since the first launch, by the profiler's clock"
LANES = [timeline.Timeline(title=name, unit=CLOCK, where={"case": name}) for name in DRAWN]


def report(page: Page, rows: Rows) -> None:
    """Tables, a picture, and what is held to a limit."""
    title, ways = "16 slices of {batch:,} x 256, {device}", rows.where(of="way")
    columns: dict[str, Column] = {"way": "case", "launches": "launches", "kernels": "kernels",
        "GPU µs": "gpu", "wall µs": "wall", "faster": ratio("faster"),
        "A100, its trace: faster": "a100_faster"}  # fmt: skip
    page.table(title, ways.where(batch=rows[0]["batch"]), columns)
    more: dict[str, Column] = {"operators": "operators", "host µs": "host",
        "wall µs (p10 to p90)": spread("wall"), "error": error()}  # fmt: skip
    page.detail.table(title, ways, {**columns, **more}, by=("batch",))
    page.detail.grid("{batch:,} rows a slice: kernels x µs of each (in brackets: an A100's trace)",
        rows.where(of="kernels", batch=BATCH), "case", "kind", each, "way", kind)  # fmt: skip
    page.picture("traces", rows.where(drawn=True), LANES,
        "Between launches the GPU is idle; a CUDA graph closes the gaps")  # fmt: skip
    page.bar("split_stack, kernels more or less than 36", rows.where(case=SPLIT, **GPU), "off", at_most=0)
    page.bar("combined, kernels more or less than 5", rows.where(case=COMBINED, **GPU), "off", at_most=0)
    page.bar("split_stack compiled, kernels", rows.where(case=COMPILED[SPLIT], **GPU), "kernels", at_most=19)
    page.bar("combined compiled, kernels", rows.where(case=COMPILED[COMBINED], **GPU), "kernels", at_most=4)
    page.bar("split_stack compiled with combo kernels, kernels", rows.where(**GPU), fewest, at_most=4)
    page.bar("split_stack ÷ combined, wall", rows.where(case=SPLIT, **GPU), "of_combined", at_least=4, unit="x")
    page.bar("pointer list ÷ combined, wall", rows.where(case=LIST, **GPU), "of_combined", at_most=1, unit="x")
