"""What a fresh process does; it loads torch before the clock runs, and nothing of pagedopt."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator

import torch


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
