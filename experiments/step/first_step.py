"""How long does a program wait for its first step, with a cold and a warm kernel cache, and for the import?

Answer (H200, 2026-11): 0.40 s cold, 0.19 s warm, 0.20 s for the import after torch.

Each in a process of its own, imports inside ``step()`` included; the warm cache is what the cold step before it left.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator

import torch

from experiments import child
from experiments.lab import Page, Row, Rows, Run, series

# --- what a fresh process does; it loads torch before the clock runs, and nothing of pagedopt


def first_step(device: str) -> Iterator[dict[str, float]]:
    """Seconds to import PagedAdamW, and of its first step over 148 tensors."""
    begin = time.perf_counter()
    from pagedopt import PagedAdamW

    imported = time.perf_counter() - begin
    params = [torch.nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(148)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = PagedAdamW(params)
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    wait()
    begin = time.perf_counter()
    optimizer.step()
    wait()
    yield {"import": imported, "step": time.perf_counter() - begin}


def importing(module: str) -> Iterator[dict[str, float]]:
    """Seconds to import a module after torch."""
    begin = time.perf_counter()
    importlib.import_module(module)
    yield {"import": time.perf_counter() - begin}


# --- the question

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
