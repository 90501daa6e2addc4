"""Is a step as fast as in another checkout of the project?  Both in turn, each time in a process of its own.

    python scripts/two_trees.py --other FOLDER

A line per work and clock: this tree's time over the other's.  Without another one it is this one against itself: ratios
are then as far from 1 as chance takes them.  Of GPU times the medians are compared, of host times the least: what else
the host does only adds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run both trees in turn, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=checkout, default=ROOT, metavar="FOLDER", help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of both trees (default: 3)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="toys: the numbers mean nothing")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.steps:
        for row in steps(asked.device, asked.quick):
            print(json.dumps(row), flush=True)
        return
    found: dict[str, list[dict[str, Any]]] = {"other": [], "this": []}
    for number in range(1 if asked.quick else asked.rounds):
        for name in list(found) if number % 2 else list(found)[::-1]:
            found[name] += taken(ROOT if name == "this" else asked.other, asked.device, asked.quick)
    print("\n".join(compared(found["other"], found["this"])))


def checkout(text: str) -> Path:
    """A folder with the package in it.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    folder = Path(text)
    if not (folder / "pagedopt" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no pagedopt in it")
    return folder.resolve()


def taken(tree: Path, device: str, quick: bool) -> list[dict[str, Any]]:
    """Rows of a process that imports a tree's pagedopt, with caches of its own: versions need not share kernels."""
    command = [sys.executable, __file__, "--steps", "--device", device, *["--quick"] * quick]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(tree), "PAGEDOPT_CACHE_DIR": cache}
        done = subprocess.run(command, cwd=cache, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compared(other: list[dict[str, Any]], this: list[dict[str, Any]]) -> Iterator[str]:
    """A line per work and clock, of rows of samples."""
    for work in dict.fromkeys(row["work"] for row in this):
        for clock, best in (("gpu", median), ("host", min)):
            times = [[t for row in rows if row["work"] == work for t in row[clock]] for rows in (other, this)]
            if all(times):
                one, two = (float(best(samples)) for samples in times)
                yield f"{work}, {clock}, {best.__name__}: {one:,.1f} µs, this {two:,.1f} µs: {two / one:.3f}"


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
    """Microseconds by work: GPU time between events, host time of step() alone; of whichever pagedopt is imported."""
    from pagedopt import PagedAdamW

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


if __name__ == "__main__":
    main()
