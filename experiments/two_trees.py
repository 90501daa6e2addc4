"""Is a step as fast as in another checkout of the project?  Both in turn, each time in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import report

NAME = "two_trees"
TREES = ("other", "this")
#: Measured in a child by whichever pagedopt it imports: GPU time between events, host time of step() alone.
CHILD = """
import json, sys, time, torch
from pagedopt import PagedAdamW
from math import prod
device, quick = sys.argv[1], sys.argv[2] == "quick"
gpu = device.startswith("cuda")
wait = torch.cuda.synchronize if gpu else (lambda: None)
w = 768
norm = [(w,), (w,)]
layer = [*norm, (w, 3 * w), (3 * w,), (w, w), (w,), *norm, (w, 4 * w), (4 * w,), (4 * w, w), (w,)]
gpt2 = [(50257, w), (1024, w), *layer * 12, *norm]
f32, large, state = torch.float32, [(4096, 4096)] * 16, {"device_budget": 0}  # large: 2.1 GB of state
works = {"10 x (2, 3)": ([(2, 3)] * 10, f32, 60), "1,000 x (2, 3)": ([(2, 3)] * 1000, f32, 60),
         "5,000 x (2, 3)": ([(2, 3)] * 5000, f32, 60)}
if gpu:
    works |= {"GPT-2, float32": (gpt2, f32, 30), "GPT-2, bfloat16": (gpt2, torch.bfloat16, 30),
              "1 B in 60 tensors": ([(4096, 4096)] * 60, f32, 10)}
    works |= {f"1,000 x (2, 3), {name}": ([(2, 3)] * 1000, f32, 60, {"transport": name})
              for name in ("mapped", "memcpy", "struct", "hybrid")}
    works |= {"268 M away, mapped": (large, f32, 8, state),
              "268 M half away, mapped": (large, f32, 8, {"device_budget": 1 << 30}),
              "268 M away, mapped, in place": (large, f32, 8, {**state, "host_access": "in_place"}),
              "268 M away, managed": (large, f32, 8, {**state, "placement": "managed"}),
              "268 M, host": (large, f32, 8, {"placement": "host"})}
if quick:
    works = {"40 x (2, 3)": ([(2, 3)] * 40, f32, 5), "40 x (2, 3), away": ([(2, 3)] * 40, f32, 5, state)}
out = {}
for name, (shapes, dtype, count, *options) in works.items():
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
            torch.cuda._sleep(40_000_000 if tiny else 6_000_000)  # the launch waits behind it: no host time in between
            events[0].record()
        begin = time.perf_counter()
        optimizer.step()
        host.append((time.perf_counter() - begin) * 1e6)
        if gpu:
            events[1].record()
            wait()
            device_time.append(events[0].elapsed_time(events[1]) * 1e3)
    out[name] = {"host": host[5:], "gpu": device_time[5:]}
    del params, optimizer
    if gpu:
        torch.cuda.empty_cache()
print(json.dumps(out))
"""


def measure(tree: Path, device: str, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Microseconds by work and clock, measured by a process that imports pagedopt from ``tree``.

    Raises:
        RuntimeError: the process failed; with its last words.
    """
    with tempfile.TemporaryDirectory() as cache:  # two versions need not understand each other's compiled kernels
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, device, "quick" if quick else "full"],
            env={**os.environ, "PYTHONPATH": str(tree), "PAGEDOPT_CACHE_DIR": cache},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{tree}: {done.stderr.strip()[-2000:]}")
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per work and clock: the least and the median of each tree, and this tree's over the other's."""
    rows = []
    for work in rounds[0]["this"]:
        for clock, least in (("gpu", False), ("host", True)):
            times = {tree: [t for r in rounds for t in r[tree][work][clock]] for tree in TREES}
            if not times["this"]:
                continue
            row: dict[str, Any] = {"work": work, "clock": clock}
            for tree in TREES:
                row[tree] = {"min": min(times[tree]), "median": statistics.median(times[tree])}
            kind = "min" if least else "median"
            rows.append({**row, "ratio": row["this"][kind] / row["other"][kind], "of": kind})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON."""
    parser = report.options(NAME, __doc__)
    parser.add_argument("--other", type=Path, required=True, metavar="FOLDER", help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of both trees (default: 3)")
    options: argparse.Namespace = parser.parse_args(arguments)
    if not (options.other / "pagedopt" / "__init__.py").is_file():
        parser.error(f"--other {options.other}: there is no pagedopt in it")
    device = report.chosen_device(options.device)
    rounds = []
    for number in range(1 if options.quick else options.rounds):
        trees = {"other": options.other.resolve(), "this": report.ROOT}
        order = TREES if number % 2 else TREES[::-1]
        rounds.append({name: measure(trees[name], str(device), options.quick) for name in order})
    rows = summary(rounds)
    text = [
        [r["work"], r["clock"], *(f"{r[t]['min']:,.1f} / {r[t]['median']:,.1f}" for t in TREES),
         f"{r['ratio']:.3f}", r["of"]]
        for r in rows
    ]  # fmt: skip
    headings = ("work", "clock", "other: min / median", "this: min / median", "this / other", "of")
    report.show(report.console(), "us a step of PagedAdamW", headings, text)
    path = report.write(options.out, NAME, device, {"device": str(device), "quick": options.quick, "rows": rows})
    print(f"written: {path}")
    return 0
