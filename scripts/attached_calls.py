"""What `attach(model)` costs the host: functions of the package that an iteration calls, and time in hooks.

    python scripts/attached_calls.py

The first line counts calls of the package's Python functions in a forward and a step of an attached Linear, ReLU and
Linear, whose step is queued.  The second is the time of a forward with nothing pending, for each module of 301, over
that of a model without hooks, and over that of one with two empty hooks for each module.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import pagedopt

PACKAGE = str(Path(pagedopt.__file__).parent) + "/"


def calls(act: Callable[[], Any]) -> int:
    """How many functions of the package are called."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def least(act: Callable[[], Any], times: int = 400) -> float:
    """Microseconds of the fastest of many calls."""

    def timed() -> float:
        begin = time.perf_counter()
        act()
        return (time.perf_counter() - begin) * 1e6

    return min(timed() for _ in range(times))


def attached(model: nn.Module, x: torch.Tensor) -> pagedopt.PagedAdamW:
    """An optimizer whose step is queued, in the state in which each iteration finds it."""
    optimizer = pagedopt.PagedAdamW(model.parameters(), device_budget=0)
    optimizer.attach(model)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return optimizer


def main() -> None:
    """Print both lines."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)
    optimizer = attached(model, x)
    gc.disable()
    optimizer.zero_grad()
    found: list[torch.Tensor] = []
    forward = calls(lambda: found.append(model(x)))
    found.pop().sum().backward()
    step = calls(optimizer.step)
    print(f"calls of the package: forward {forward}, step {step}, in sum {forward + step}")

    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(100)])
    x, modules = torch.randn(2, 4), list(net.modules())
    bare = least(lambda: net(x))
    handles: list[Any] = [m.register_forward_pre_hook(lambda *_: None) for m in modules]
    handles += [m.register_forward_hook(lambda *_: None) for m in modules]
    empty = least(lambda: net(x))
    for handle in handles:
        handle.remove()
    optimizer = attached(net, x)
    net(x)
    passed = least(lambda: net(x))
    over = [(passed - before) / len(modules) for before in (bare, empty)]
    print(f"nothing pending: {over[0]:.2f} us a module over none, {over[1]:.2f} us over two empty hooks")


if __name__ == "__main__":
    main()
