"""How long must a kernel be before the launch of the next one is hidden behind it?

Answer (H200, 2026-11): 88 µs, at 65,536 rows a slice, are enough for split_stack and 24 are not (1.69 times the
kernels).

split_stack over slices of 64 rows and more: the same 36 launches, longer and longer kernels.  Two witnesses: the gaps
in a trace, where the host is slowed by being listened to, and, with nobody listening, what a call takes beyond what its
kernels need when they are queued in advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from experiments.harness.plot import BLUE, ORANGE, PAGE, Plot
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Table, Text, number
from experiments.harness.time import Case
from experiments.works.slices import COMBINED, SPLIT, Slices
from experiments.works.trace import counted

NEEDS_GPU = True
BATCHES = (64, 256, 1024, 4096, 16384, 65536)
#: A launch is hidden where the call takes no more than this beyond its kernels.
HIDDEN = 1.1


def measure(run: Run) -> Iterator[Row]:
    """A row per batch and way: wall and GPU time of a call, and the gaps of its trace as text."""
    run.rounds, run.seconds = run.size((60, 1.0), (3, 0.1))
    for batch in run.each(run.size(BATCHES, (64, 256))):
        with run.attempt(f"{batch:,} rows a slice", (Exception,)):
            work = Slices(batch, run.device)
            ways = {SPLIT: work.way(work.split_stack), COMBINED: work.way(work.combined)}
            gaps = {name: counted(way) for name, way in ways.items()}
            timings = run.measure([Case(name, way, repeats=4) for name, way in ways.items()])
            for name, timing in timings.items():
                points = [(gap.before, gap.length) for gap in gaps[name].gaps]
                yield {
                    "batch": batch,
                    "case": name,
                    "kernels": gaps[name].kernels,
                    "before": median(before for before, _ in points),
                    "gap": median(gap for _, gap in points),
                    "points": " ".join(f"{before:.1f},{gap:.1f}" for before, gap in points),
                    **timing,
                }


def derive(rows: Rows) -> Rows:
    """GPU time of a kernel, and what each adds to the wall beyond it."""
    found = Rows()
    for row in rows:
        gpu = row["gpu"]["median"] if row["gpu"] else None
        found.append({
            **row,
            "each": gpu / row["kernels"] if gpu else None,
            "exposed": (row["wall"]["median"] - gpu) / row["kernels"] if gpu else None,
            "of_gpu": row["wall"]["median"] / gpu if gpu else None,
        })  # fmt: skip
    return found


def first_hidden(rows: Rows) -> Row | None:
    """The shortest kernels of split_stack behind which the host's work is hidden."""
    hidden = [row for row in rows.where(case=SPLIT) if row["of_gpu"] and row["of_gpu"] <= HIDDEN]
    return min(hidden, key=lambda row: row["each"], default=None)


def sentence(rows: Rows) -> str:
    """From which length on."""
    if (row := first_hidden(rows)) is None:
        return f"At no batch here does a call end within {HIDDEN:g} times its kernels."
    return (
        f"Launches of split_stack are hidden from {row['batch']:,} rows a slice on, where a kernel takes "
        f"{number(row['each'])} µs: a call takes {row['of_gpu']:.2f} times what its kernels do."
    )


def draw(figure: Any, rows: Rows) -> None:
    """Gaps of traces as dots; what is measured without a profiler as a line."""
    figure.set_size_inches(PAGE, 4)
    axes = figure.subplots()
    for row in rows.where(case=SPLIT):
        points = [tuple(map(float, point.split(","))) for point in row["points"].split()]
        axes.scatter(*zip(*points, strict=True), s=10, alpha=0.5, color=ORANGE, linewidths=0)
    said = [("dots: gaps in traces", ORANGE)]
    if line := [(row["each"], row["exposed"]) for row in rows.where(case=SPLIT) if row["each"]]:
        axes.plot(*zip(*line, strict=True), color=BLUE, marker="o")
        said.append(("line: a call beyond its kernels, for each, nobody listening", BLUE))
    for at, (words, color) in enumerate(said):
        axes.text(0.98, 0.94 - 0.07 * at, words, color=color, ha="right", va="center", transform=axes.transAxes)
    axes.set(xscale="log", xlabel="µs of the kernel before (log)", ylabel="µs until the next")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


TABLES = [
    Table("{case}", by=("case",), columns={
        "rows a slice": lambda row: f"{row['batch']:,}", "kernels": "kernels", "wall µs": "wall", "GPU µs": "gpu",
        "wall ÷ GPU": "of_gpu", "a kernel, µs": "each", "exposed µs a kernel": "exposed",
        "trace: kernel before, µs": "before", "trace: gap, µs": "gap",
    })
]  # fmt: skip
TEXTS = [Text("gaps", sentence)]
PLOTS = [Plot("gaps", draw)]
