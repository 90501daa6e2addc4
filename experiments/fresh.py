"""What only a fresh process can tell: the first step with a cold and a warm kernel cache, and the cost of importing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.bench import Stats
from experiments.report import ROOT

FIRST_STEP = """
import sys, time, torch
begin = time.perf_counter()
from pagedopt import PagedAdamW
imported = time.perf_counter() - begin
device = sys.argv[1]
params = [torch.nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(148)]
for p in params:
    p.grad = torch.randn_like(p)
optimizer = PagedAdamW(params)
wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
wait()
begin = time.perf_counter()
optimizer.step()
wait()
print(imported, time.perf_counter() - begin)
"""
IMPORT = """
import time, torch
begin = time.perf_counter()
import {module}
print(time.perf_counter() - begin)
"""


def seconds(code: str, *arguments: str, cache: Path | None = None) -> list[float]:
    """The numbers that a program prints, run in a fresh interpreter.

    Raises:
        RuntimeError: the process failed; with its last words.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if cache is not None:
        environment["PAGEDOPT_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a fresh process failed ({done.returncode}): {done.stderr.strip()[-800:]}")
    return [float(word) for word in done.stdout.split()]


def first_steps(device: str, times: int) -> dict[str, Any]:
    """Seconds of a first step over 148 tensors: ``cold`` into an empty cache folder, ``warm`` from the one it left.

    ``import`` is what ``from pagedopt import PagedAdamW`` costs after torch in the same processes (a plain ``import
    pagedopt`` loads next to nothing and costs less).
    """
    cold: list[float] = []
    warm: list[float] = []
    imports: list[float] = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            for steps in (cold, warm):
                imported, step = seconds(FIRST_STEP, device, cache=Path(folder))
                imports.append(imported)
                steps.append(step)
    return {"cold": _summary(cold), "warm": _summary(warm), "import": _summary(imports)}


def imports(modules: list[str], times: int = 2) -> dict[str, Any]:
    """Seconds to import each module after torch, in a process each."""
    return {m: _summary([seconds(IMPORT.format(module=m))[0] for _ in range(times)]) for m in modules}


def _summary(samples: list[float]) -> dict[str, float]:
    """The usual, and the best: of an import, the rest is the disk."""
    return {**vars(Stats.of(samples)), "best": min(samples)}
