"""What does a norm per tensor cost through one list of pointers, and in ``torch._foreach_norm`` around its old limit?

Answer (H200, 2026-11): nothing breaks at 422 any more.  For 424 tensors torch takes less of the host (756 µs to our
1,749, as our table is built anew in every call) and more of the GPU (17 µs to 13; for 1,000 tensors 37 to 15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import pagedopt
from experiments.harness.plot import Lines, Plot
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Grid, Text, number, times
from experiments.harness.time import Case, kernel_launches
from experiments.works.ways import counts, on_grid, set_rounds

COUNTS = (10, 100, 423, 424, 1000, 4096, 16384, 65536)


def measure(run: Run) -> Iterator[Row]:
    """A row per count and way, after its norms were held to float64."""
    set_rounds(run)
    for count in run.each(counts(run, COUNTS)):
        # A buffer row each, as in a table of small layers; ours and torch's see the same tensors.
        tensors = list(torch.rand(count, 128, device=run.device)[:, :6].unbind())
        functions: dict[str, Callable[[], list[torch.Tensor]]] = {
            "torch": lambda t=tensors: list(torch._foreach_norm(t, 2)),  # type: ignore[misc]
            "pagedopt": lambda t=tensors: pagedopt.foreach_norm(t, 2),  # type: ignore[misc]
        }
        exact = torch.linalg.vector_norm(torch.stack(tensors).double(), dim=1)
        for name, function in functions.items():
            torch.testing.assert_close(torch.stack(function()).double(), exact, rtol=1e-5, atol=0, msg=name)
        repeats = 4 if count <= 1000 else 1
        timings = run.measure([Case(name, function, repeats=repeats) for name, function in functions.items()])
        for name, timing in timings.items():
            launches = None
            if run.device.type == "cuda" and count <= 1000 and name == "torch":
                launches = kernel_launches(functions[name])
            yield {"count": count, "way": name, "launches": launches, **timing}


def derive(rows: Rows) -> Rows:
    """What has a number of launches, marked."""
    return Rows({**row, "counted": bool(row["launches"])} for row in rows)


def sentences(rows: Rows) -> str:
    """Below and above the old limit."""
    found = []
    for count in (423, 424):
        wall = {row["way"]: number(row["wall"]["median"]) for row in rows.where(count=count)}
        if wall:
            found.append(f"- Norms of {count} tensors: torch {wall['torch']} µs, ours {wall['pagedopt']} µs.")
    return "\n".join(found)


def launched(row: Row) -> str:
    """Kernels of one call."""
    return str(row["launches"])


TABLES: list[Grid] = [
    on_grid("norms of N tensors: host / GPU / wall µs", times),
    on_grid("kernels that torch._foreach_norm launches", launched, counted=True),
]
PLOTS = [
    Plot("norms", [
        Lines(f"norms of N tensors, {clock}", x="count", y=clock, each="way", label="tensors")
        for clock in ("host", "wall")
    ])
]  # fmt: skip
TEXTS = [Text("answer", sentences)]
