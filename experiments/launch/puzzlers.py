"""What do 16 short LayerNorms cost one by one, all at once, compiled, as a graph, and as a list of pointers?

Answer: see notes/launch_overhead.md.

The work is the puzzlers' (:mod:`experiments.works.slices`).  Kernels, launches, operators and gaps are counted in a
trace; times are taken without it.  16 MiB of input lie in an H200's L2, so it is done again with 256 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.clock import Case
from experiments.columns import ratio
from experiments.comparing import over
from experiments.device import chosen_device
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import Bars
from experiments.works import slices
from experiments.works.apart import counted_apart
from experiments.works.slices import COMBINED, COMBO, COMPILED, LIST, SPLIT
from experiments.works.trace import counted

MEASURES = ("launch", "tables")
BATCH = 1024


#: Of the puzzlers' trace on an A100: kernels, and µs from the first to the last.
A100 = {SPLIT: (36, 1613), COMBINED: (5, 191), COMPILED[SPLIT]: (19, 634), COMPILED[COMBINED]: (4, 157)}


def measure(run: Run) -> Iterator[Row]:
    """A row per way: times, counts, and its error."""
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
            yield {**row, "error": errors[row["case"]], **found.get((row["case"],), {})}


def traces(device: str, batch: int, quick: bool) -> Iterator[Row]:
    """In a process of its own: what a trace of each way counts."""
    run = Run(chosen_device(device), quick)
    for name, way, _ in slices.made(slices.Slices(batch, run.device), run):
        if run.device.type == "cpu" and name not in (SPLIT, COMBINED):
            continue  # there are operators to be seen, and nothing else
        with run.attempt(f"trace of {name}", (Exception,)):
            counts = counted(way)
            yield {"case": name, **counts.as_dict()}


def derive(rows: Rows) -> Rows:
    """Speed over split_stack, wall times against combined, what the A100 had."""
    found = Rows()
    for row in (ways := rows.where(of="way")):
        beside = {way["case"]: way["wall"] for way in ways.where(batch=row["batch"])}
        split, combined = over(beside.get(SPLIT), row["wall"]), over(row["wall"], beside.get(COMBINED))
        row = {**row, "clock": "wall", "faster": split, "of_combined": combined, "a100_faster": ""}
        if row["device"] == "cpu":
            row["kernels"] = None
        if row["batch"] == BATCH and row["case"] in A100:
            kernels, span = A100[row["case"]]
            off = None if row.get("kernels") is None else abs(row["kernels"] - kernels)
            row |= {"a100_faster": f"{A100[SPLIT][1] / span:.1f} x", "off": off}
        found.append(row)
    return found


def fewest(rows: Rows) -> float | None:
    """Kernels of split_stack where torch may put as many side by side as it likes."""
    counts = [row["kernels"] for row in rows if row["case"].startswith(COMPILED[SPLIT]) and COMBO in row["case"]]
    return min((count for count in counts if count is not None), default=None)


GPU: dict[str, Any] = {"of": "way", "batch": BATCH, "device": "cuda"}


def report(page: Page, rows: Rows) -> None:
    """Tables, a picture, and what is held to a limit."""
    title, ways = "16 slices of {batch:,} x 256, {device}", rows.where(of="way")
    columns: dict[str, Column] = {"way": "case", "launches": "launches", "kernels": "kernels",
        "GPU µs": "gpu", "wall µs": "wall", "faster": ratio("faster"),
        "A100, its trace: faster": "a100_faster"}  # fmt: skip
    page.table(title, ways.where(batch=rows[0]["batch"]), columns)
    page.picture("ways", ways.where(batch=rows[0]["batch"]), [Bars(title="16 slices of {batch:,} x 256, {device}",
        name="case", length="wall", wrap=32)], "A call of each way: between launches the GPU is idle")  # fmt: skip
    page.bar("split_stack, kernels more or less than 36", rows.where(case=SPLIT, **GPU), "off", "≤ 0")
    page.bar("combined, kernels more or less than 5", rows.where(case=COMBINED, **GPU), "off", "≤ 0")
    page.bar("split_stack compiled, kernels", rows.where(case=COMPILED[SPLIT], **GPU), "kernels", "≤ 19")
    page.bar("combined compiled, kernels", rows.where(case=COMPILED[COMBINED], **GPU), "kernels", "≤ 4")
    page.bar("split_stack compiled with combo kernels, kernels", rows.where(**GPU), fewest, "≤ 4")
    page.bar("split_stack ÷ combined, wall", rows.where(case=SPLIT, **GPU), "of_combined", "≥ 4 x")
    page.bar("pointer list ÷ combined, wall", rows.where(case=LIST, **GPU), "of_combined", "≤ 1 x")
