"""An optimizer per parameter, stepping from hooks as torchtune does; and what a thousand of them hold, in a process of
its own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from file_support import descriptors, disk_bytes, process_bytes

from pagedopt import PagedAdamW, PagedOptimizer

#: Shapes of a model of many small parameters and some large ones.
SMALL, LARGE = (33, 3), (300, 301)
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


#: Parameters that have hooks.
with_hooks: list[torch.nn.Parameter] = []


def parameters(count: int, large: int = 0, device: str = "cpu") -> list[torch.nn.Parameter]:
    """``count`` in all, of which every so many-th is large."""
    every = count // large if large else count + 1
    generator = torch.Generator().manual_seed(7)
    shapes = [LARGE if i % every == every - 1 else SMALL for i in range(count)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def loss(params: list[torch.nn.Parameter], step: int) -> torch.Tensor:
    """One whose gradients differ between parameters, elements and steps."""
    return torch.stack([((i % 7 + 1) * p.sin() * (p + step)).sum() for i, p in enumerate(params)]).sum()


def hooked(params: list[torch.nn.Parameter], **options: Any) -> dict[torch.Tensor, PagedOptimizer]:
    """An optimizer for each, which takes its step and drops the gradient as soon as that is there."""
    optimizers: dict[torch.Tensor, PagedOptimizer] = {p: PagedAdamW([p], **ADAMW, **options) for p in params}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    with_hooks.extend(params)
    for p in params:
        p.register_post_accumulate_grad_hook(step)
    return optimizers


def unhook(params: list[torch.nn.Parameter]) -> None:
    """Hooks hold their optimizers where the garbage collector does not look."""
    for p in params:
        (p._post_accumulate_grad_hooks or {}).clear()  # type: ignore[attr-defined]
    gone = set(map(id, params))
    with_hooks[:] = [p for p in with_hooks if id(p) not in gone]


def train(params: list[torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        loss(params, step).backward()


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what autograd has freed
    return process_bytes("VmRSS")


def hold(count: int, large: int, options: dict[str, Any]) -> None:
    """Print what ``count`` optimizers hold after some steps, and what is left of it without them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    folder = Path(os.environ["PAGEDOPT_STATE_DIR"])
    warm = parameters(3)
    keep = hooked(warm, **options)
    train(warm, 0, 2)
    unhook(warm)
    del keep, warm
    params = parameters(count, large)
    train(params, 0, 1)  # what autograd keeps
    for p in params:
        p.grad = None
    gc.collect()
    before = resident_bytes(), descriptors(), threading.active_count()
    optimizers = hooked(params, **options)
    train(params, 0, 3)
    gc.collect()
    rss = resident_bytes() - before[0]
    reports = [opt.memory_report() for opt in optimizers.values()]
    found: dict[str, Any] = {
        "rss": rss,
        "descriptors": descriptors() - before[1],
        "threads": threading.active_count() - before[2],
        "disk": disk_bytes(folder),
        "state": sum(2 * p.nbytes for p in params),
        "planned": sum(sum(report.by_place.values()) for report in reports),
        "near": sum(report.by_place.get("host", 0) for report in reports),
    }
    del reports
    unhook(params)
    del optimizers
    gc.collect()
    found["left"] = {"descriptors": descriptors() - before[1], "disk": disk_bytes(folder)}
    print(json.dumps(found))


if __name__ == "__main__":
    hold(*map(json.loads, sys.argv[1:]))
