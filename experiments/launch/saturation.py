"""How many rows must a kernel have before the GPU is full, and why are 16 times the data not 16 times as long?

Answer (H200, 2026-11): tanh at 16,384 rows (16 MiB), LayerNorm no sooner, and at a quarter of tanh's rate. 16 times
the rows of a slice take 6.7 times as long, and 3.7 times: most of the short kernel is not work.

LayerNorm and tanh over rows of 256 floats, GPU time: once over one tensor, which stays in the L2 as long as it fits,
and once over tensors that take turns and are 512 MiB together.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.harness.plot import BLUE, GRAY, LETTERS, ORANGE, PAGE, Plot
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Grid, Text, number
from experiments.harness.time import Case
from experiments.works.slices import DIM

#: 64 … 262,144: a slice of the puzzlers has 1,024, all of them 16,384.
ROWS = tuple(4**i for i in range(3, 10))
SLICE, ALL = 1024, 16384
NORM, TANH = "LayerNorm", "tanh"
OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    NORM: lambda x: torch.nn.functional.layer_norm(x, (DIM,), eps=0),
    TANH: torch.tanh,
}
SAME, COLD = "one tensor", "in turn"
POOL = 512 << 20


def measure(run: Run) -> Iterator[Row]:
    """A row per operation, number of rows and place of the data."""
    run.rounds, run.seconds = run.size((60, 1.0), (3, 0.1))
    most = run.size(POOL if run.device.type == "cuda" else POOL // 8, 1 << 20)
    sizes = run.size(ROWS if run.device.type == "cuda" else ROWS[:-1], (16, 256))
    for rows in run.each(sizes):
        pool = torch.rand(max(1, most // (4 * DIM * rows)), rows, DIM, device=run.device)
        with run.attempt(f"{rows:,} rows", (Exception,)):
            cases = [
                Case(
                    f"{name}, {where}", repeated(operation, list(pool[: len(pool) if where == COLD else 1])), repeats=16
                )
                for name, operation in OPERATIONS.items()
                for where in (SAME, COLD)
            ]
            for case, timing in run.measure(cases).items():
                name, where = case.split(", ")
                about = {"operation": name, "where": where, "device": run.device.type}
                yield {**about, "rows": rows, "bytes": 8 * DIM * rows, **timing}


def repeated(operation: Callable[[torch.Tensor], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], object]:
    """One input after the other; results are kept as long, so that they take turns, too."""
    kept: deque[torch.Tensor] = deque(maxlen=len(inputs))
    turn = itertools.cycle(inputs)
    return lambda: kept.append(operation(next(turn)))


def derive(rows: Rows) -> Rows:
    """GB/s, and the time of a row against that of a row among 1,024."""
    found = Rows()
    for row in rows:
        few = rows.number("best", operation=row["operation"], where=row["where"], rows=SLICE)
        found.append({
            **row,
            "series": f"{row['operation']}, {row['where']}",
            "rate": row["bytes"] / row["best"] / 1e3,
            "of_slice": row["best"] / few if few else None,
        })  # fmt: skip
    return found


def cell(row: Row) -> str:
    """µs, GB/s."""
    return f"{number(row['best'])} µs, {number(row['rate'])} GB/s"


def sentence(rows: Rows) -> str | None:
    """16 times the data, how much longer."""
    lines = [
        f"- {row['series']}: 16 times the rows of a slice take {number(row['of_slice'])} times as long"
        + (" (A100: 7.1 times)." if row["operation"] == NORM and row["where"] == SAME else ".")
        for row in rows.where(rows=ALL)
        if row["of_slice"]
    ]
    return "\n".join(lines)


#: Colour and marker; where its name stands, seen from the curve, in points.
LOOKS = {SAME: (BLUE, "o", (-8, 4), "right"), COLD: (ORANGE, "s", (8, -10), "left")}


def draw(figure: Any, rows: Rows) -> None:
    """GB/s against rows, a panel per operation, curves named at their ends."""
    figure.set_size_inches(PAGE, 4)
    operations = list(rows.groups("operation"))
    panels = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for axes, operation in zip(panels, operations, strict=True):
        for group in operation.groups("where"):
            color, marker, beside, side = LOOKS[group[0]["where"]]
            points = [(row["rows"], row["rate"]) for row in group]
            axes.plot(*zip(*points, strict=True), marker=marker, color=color, fillstyle="none")
            named = points[len(points) // 2]
            axes.annotate(group[0]["where"], named, beside, textcoords="offset points", color=color, ha=side)
        for count, name in ((SLICE, "a slice"), (ALL, "all 16")):
            axes.axvline(count, color=GRAY, linewidth=0.8)
            place = axes.get_xaxis_transform()
            axes.text(count, 1.0, name, ha="center", va="bottom", transform=place, fontsize=LETTERS)
        axes.set(xscale="log", yscale="log", xlabel="rows of 256 floats (log)")
        axes.set_title(operation[0]["operation"], pad=18, fontsize=LETTERS + 1)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("GB/s, read and written (log)")


TABLES = [
    Grid("LayerNorm and tanh over rows of 256 floats", down="series", across="rows", cell=cell, corner="rows")
]  # fmt: skip
TEXTS = [Text("saturation", sentence)]
PLOTS = [Plot("saturation", draw)]
