"""Steps of whichever pagedopt a process imports: nothing else of this project may be needed here, nor there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from pagedopt import PagedAdamW


def works(gpu: bool, quick: bool) -> dict[str, tuple[Any, ...]]:
    """Name → shapes, dtype, steps, and options if any."""
    w = 768
    norm = [(w,), (w,)]
    layer = [*norm, (w, 3 * w), (3 * w,), (w, w), (w,), *norm, (w, 4 * w), (4 * w,), (4 * w, w), (w,)]
    gpt2 = [(50257, w), (1024, w), *layer * 12, *norm]
    f32, large, state = torch.float32, [(4096, 4096)] * 16, {"device_budget": 0}  # large: 2.1 GB of state
    if quick:
        return {"40 x (2, 3)": ([(2, 3)] * 40, f32, 5), "40 x (2, 3), away": ([(2, 3)] * 40, f32, 5, state)}
    found: dict[str, tuple[Any, ...]] = {f"{n:,} x (2, 3)": ([(2, 3)] * n, f32, 60) for n in (10, 1000, 5000)}
    if gpu:
        found |= {
            "GPT-2, float32": (gpt2, f32, 30),
            "GPT-2, bfloat16": (gpt2, torch.bfloat16, 30),
            "GPT-2, int8": (gpt2, f32, 30, {"state_format": "int8"}),
            "1 B in 60 tensors": ([(4096, 4096)] * 60, f32, 10),
        }
        for name in ("mapped", "memcpy", "struct", "hybrid"):
            found[f"1,000 x (2, 3), {name}"] = [(2, 3)] * 1000, f32, 60, {"transport": name}
        found |= {
            "268 M away, mapped": (large, f32, 8, state),
            "268 M half away, mapped": (large, f32, 8, {"device_budget": 1 << 30}),
            "268 M away, mapped, in place": (large, f32, 8, {**state, "host_access": "in_place"}),
            "268 M away, managed": (large, f32, 8, {**state, "placement": "managed"}),
            "268 M, host": (large, f32, 8, {"placement": "host"}),
        }
    return found


def steps(device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Microseconds by work: GPU time between events, host time of step() alone."""
    gpu = device.startswith("cuda")
    wait = torch.cuda.synchronize if gpu else (lambda: None)
    for name, (shapes, dtype, count, *options) in works(gpu, quick).items():
        params = [torch.nn.Parameter(torch.randn(s, dtype=dtype, device=device)) for s in shapes]
        optimizer = PagedAdamW(params, **(options or [{}])[0])
        tiny = prod(shapes[0]) < 1000
        host, device_time = [], []
        for i in range(count + 5):
            if tiny or i == 0:  # new gradients each step, as a backward makes them
                for p in params:
                    p.grad = torch.randn_like(p)
            wait()
            if gpu:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                # The launch waits behind it: no host time in between.
                torch.cuda._sleep(40_000_000 if tiny else 6_000_000)
                events[0].record()
            begin = time.perf_counter()
            optimizer.step()
            host.append((time.perf_counter() - begin) * 1e6)
            if gpu:
                events[1].record()
                wait()
                device_time.append(events[0].elapsed_time(events[1]) * 1e3)
        yield {"work": name, "host": host[5:], "gpu": device_time[5:]}
        del params, optimizer
        if gpu:
            torch.cuda.empty_cache()
