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

import torch

from experiments.clock import Case
from experiments.comparing import on_one_clock, over
from experiments.lab import Page, Row, Rows, Run, number
from experiments.pictures import Lines

#: Floats of a row.
DIM = 256
#: 64 … 262,144: a slice of the puzzlers has 1,024, all of them 16,384.
ROWS = tuple(4**i for i in range(3, 10))
SLICE, ALL = 1024, 16384
NORM, SAME = "LayerNorm", "one tensor"
OPERATIONS = {NORM: lambda x: torch.nn.functional.layer_norm(x, (DIM,), eps=0), "tanh": torch.tanh}
POOL = 512 << 20


def measure(run: Run) -> Iterator[Row]:
    """A row per operation, number of rows and place of the data."""
    run.rounds, run.seconds = run.size((60, 1.0), (3, 0.1))
    sizes, most = (ROWS, POOL) if run.device.type == "cuda" else (ROWS[:-1], POOL // 8)
    for rows in run.each(run.size(sizes, (16, 256))):
        pool = torch.rand(max(1, run.size(most, 1 << 20) // (4 * DIM * rows)), rows, DIM, device=run.device)
        with run.attempt(f"{rows:,} rows", (Exception,)):
            cases = [
                Case(f"{name}, {where}", repeated(operation, list(inputs)), repeats=16)
                for name, operation in OPERATIONS.items()
                for where, inputs in {SAME: pool[:1], "in turn": pool}.items()
            ]
            yield from run.time(cases, device=run.device.type, rows=rows, bytes=8 * DIM * rows)


def repeated(operation: Callable[[torch.Tensor], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], object]:
    """One input after the other; results are kept as long, so that they take turns, too."""
    kept: deque[torch.Tensor] = deque(maxlen=len(inputs))
    turn = itertools.cycle(inputs)
    return lambda: kept.append(operation(next(turn)))


def derive(rows: Rows) -> Rows:
    """GB/s, and the time of a row against that of a row among 1,024."""
    found, known = Rows(), on_one_clock(rows)
    for row in known:
        operation, where = row["case"].split(", ")
        few = known.first(case=row["case"], rows=SLICE) or {}
        more = {"rate": row["bytes"] / row["time"]["median"] / 1e3, "of_slice": over(row["time"], few.get("time"))}
        found.append({**row, "operation": operation, "where": where, **more})
    return found


def sentence(rows: Rows) -> str:
    """16 times the data, how much longer."""
    times = [f"{row['case']} {number(row['of_slice'])}" for row in rows.where(rows=ALL) if row["of_slice"]]
    return f"Time of {ALL:,} rows ÷ time of {SLICE:,} (A100, LayerNorm: 7.1): {'; '.join(times)}." if times else ""


RATES = Lines(
    title="Short kernels do not fill a GPU (in turn: over inputs beyond the L2)",
    unit="GB/s",
    x="rows",
    y="rate",
    each="case",
    label="rows of 256 floats",
)


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, and a picture."""
    page.grid("LayerNorm and tanh over rows of 256 floats, GB/s", rows, "case", "rows", "rate", "rows")
    page.say(sentence(rows))
    page.picture("saturation", rows, [RATES])
