"""How long must a kernel be before the launch of the next one is hidden behind it?

Answer (H200, 2026-11): for split_stack 88 µs are, at 65,536 rows a slice, and 24 are not (1.69 times the kernels).

split_stack over slices of 64 rows and more: the same 36 launches of longer and longer kernels.  Two witnesses: the gaps
in a trace, where listening slows the host; without it, a call's time beyond that of its kernels queued in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from experiments.lab import Case, Column, Page, Row, Rows, Run, number, series
from experiments.pictures import Lines
from experiments.works.slices import COMBINED, SPLIT, Slices
from experiments.works.trace import counted

NEEDS_GPU = True
BATCHES = (64, 256, 1024, 4096, 16384, 65536)
#: A launch is hidden where the call takes no more than this beyond its kernels.
HIDDEN = 1.1


def measure(run: Run) -> Iterator[Row]:
    """A row per batch and way: wall and GPU time of a call, and the gaps of its trace as text."""
    run.rounds, run.seconds = run.size((60, 1.0), (3, 0.1))
    timed: list[tuple[Row, Callable[[], object]]] = []
    for batch in run.each(run.size(BATCHES, (64, 256))):
        with run.attempt(f"{batch:,} rows a slice", (Exception,)):
            work = Slices(batch, run.device)
            ways = {SPLIT: work.way(work.split_stack), COMBINED: work.way(work.combined)}
            cases = [Case(name, way, repeats=4) for name, way in ways.items()]
            timed += [(row, ways[row["case"]]) for row in run.time(cases, batch=batch)]
    for row, way in timed:  # last: launches behind a trace are slower
        with run.attempt("{case}, {batch:,} rows a slice: its trace".format(**row), (Exception,)):
            counts = counted(way)
            yield {**row, **counts.as_dict(), "before": series([gap.before for gap in counts.gaps], "GPU")}


def derive(rows: Rows) -> Rows:
    """GPU time of a kernel, and what a call takes beyond its kernels, which is by both clocks, and meant to be."""
    found = Rows()
    for row in rows:
        if row["gpu"]:
            wall, gpu, kernels = row["wall"]["median"], row["gpu"]["median"], row["kernels"]
            each = {"clock": "GPU", "median": gpu / kernels}
            row = {**row, "clock": "wall", "each": each, "exposed": (wall - gpu) / kernels, "of_gpu": wall / gpu}
            row["waits"] = waits(row["of_gpu"])
        found.append(row)
    return found


def waits(of_gpu: float) -> float:
    """Per cent of a call in which no kernel runs, from how many times as long it takes as its kernels."""
    return 100 * (1 - 1 / of_gpu)


def sentence(rows: Rows) -> str:
    """From which length on a call of split_stack takes no more than its kernels, or little more."""
    hidden = [row for row in rows.where(case=SPLIT) if row.get("of_gpu", HIDDEN + 1) <= HIDDEN]
    if not hidden:
        return f"At no batch here does a call end within {HIDDEN:g} times its kernels."
    row = min(hidden, key=lambda row: row["each"]["median"])
    return (
        f"Launches of split_stack are hidden from {row['batch']:,} rows a slice on, where a kernel takes "
        f"{number(row['each']['median'])} µs: a call takes {row['of_gpu']:.2f} times what its kernels do."
    )


DRAWN = Lines(
    title="The longer kernels are, the less the GPU waits for the next launch",
    unit="% of a call that the GPU waits",
    x="each",
    y="waits",
    each="case",
    label="µs that a kernel takes, GPU",
    log="x",
    level=("hidden", lambda _: waits(HIDDEN)),
    inches=3.6,
)


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, and a picture."""
    columns: dict[str, Column] = {"rows a slice": "batch", "wall µs": "wall", "GPU µs": "gpu",
        "wall ÷ GPU": "of_gpu", "a kernel, µs": "each", "exposed µs a kernel": "exposed",
        "trace: kernel before, µs": "before", "trace: gap, µs": "gap_each"}  # fmt: skip
    page.table("{case}", rows.where(case=SPLIT), columns)
    page.detail.table("{case}", rows.where(case=COMBINED), columns)
    page.say(sentence(rows))
    page.picture("gaps", rows, [DRAWN])
