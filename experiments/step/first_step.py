"""How long does a program wait for its first step, with a cold and a warm kernel cache, and for the import?

Answer (H200, 2026-11): 0.40 s cold, 0.19 s warm, 0.20 s for the import after torch.

Each in a process of its own, imports inside ``step()`` included; the warm cache is what the cold step before it left.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator

from experiments import child
from experiments.lab import Page, Row, Rows, Run, series
from experiments.step.fresh_process import first_step, importing

MEASURES = ("kernels", "launch", "tables", "optim", "system")
COLD, WARM, IMPORT = "first step, cold cache", "first step, warm cache", "import of pagedopt.PagedAdamW"
LIMIT = 120


def measure(run: Run) -> Iterator[Row]:
    """A row for each kind of wait (seconds)."""
    waits: dict[str, list[float]] = {COLD: [], WARM: [], IMPORT: []}
    for _ in run.each(range(run.size(4, 1))):
        with tempfile.TemporaryDirectory() as folder:
            for what in (COLD, WARM):
                found = child.only(first_step, str(run.device), limit=LIMIT, environment={"PAGEDOPT_CACHE_DIR": folder})
                waits[IMPORT].append(found["import"])
                waits[what].append(found["step"])
    for what, samples in waits.items():
        yield {"what": what, "device": run.device.type, "seconds": series(samples, "wall")}
    for module in run.size([name for name in ("cupy", "numba") if importlib.util.find_spec(name)], []):
        samples = [child.only(importing, module, limit=LIMIT)["import"] for _ in range(2)]
        yield {"what": f"import {module}", "device": run.device.type, "seconds": series(samples, "wall")}


def seconds(row: Row) -> str:
    """Steps with their spread, imports at their best."""
    found = row["seconds"]
    if row["what"].startswith("import"):
        return f"{found['min']:.3f} s (best of {found['n']})"
    return f"{found['median']:.2f} s ({found['p10']:.2f} to {found['p90']:.2f})"


def fastest(rows: Rows) -> float:
    """Of an import: the rest is the disk."""
    return float(rows[0]["seconds"]["min"])


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("fresh processes", rows, {"what": "what", "seconds": seconds})
    page.bar("first step, cold kernel cache", rows.where(what=COLD, device="cuda"), "seconds", at_most=2, unit="s")
    page.bar("first step, warm kernel cache", rows.where(what=WARM, device="cuda"), "seconds", at_most=0.3, unit="s")
    page.bar("import of pagedopt.PagedAdamW, after torch", rows.where(what=IMPORT), fastest, at_most=0.3, unit="s")
