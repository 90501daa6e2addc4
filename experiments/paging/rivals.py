"""Part ``rivals``: a step of others over the same parameters, with their state where ours is: on the host.

bitsandbytes and torchao run in processes of their own (:mod:`experiments.paging.rival_child`): they may be absent, and
may end the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import torch

from experiments.bench import Case
from experiments.paging.problem import Run, adamw
from experiments.report import ROOT
from experiments.workloads import HYPER

OURS, FUSED = "PagedAdamW, mapped, staged, budget 0", "torch fused, all on the device"
OURS_IN_PLACE = "PagedAdamW, mapped, in place, budget 0"
RIVAL, RIVAL_8BIT = "bitsandbytes PagedAdamW32bit", "bitsandbytes PagedAdamW8bit"
#: What is timed of a paged rival.
SAME, ALONE, BACK, WARM = "step and pushed out again", "step alone", "pushing out alone", "step, state still there"
PACKAGES = ("bitsandbytes", "torchao")
#: What a line of results begins with.
MARK = "row: "
LONGEST = 150


def part(run: Run) -> dict[str, Any]:
    """Rows of (contender, what is timed) with their times."""
    rows = []
    with run.attempt("ours and torch fused"):
        rows += _here(run)
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            run.left_out.append(f"{package}: not installed")
            continue
        rows += _child(run, package)
    return {"numel": run.work.numel, "state_bytes": run.state_bytes, "rows": rows}


def _here(run: Run) -> list[dict[str, Any]]:
    """Ours and torch's, in interleaved rounds."""
    steps = {
        OURS: adamw(run.parameters(), placement="mapped", host_access="staged", device_budget=0).step,
        OURS_IN_PLACE: adamw(run.parameters(), placement="mapped", host_access="in_place", device_budget=0).step,
        FUSED: torch.optim.AdamW(run.parameters(), **HYPER, fused=True).step,
    }
    times = run.measure([Case(name, step) for name, step in steps.items()], seconds=2.0)
    return [{"name": name, "what": "step", **timing} for name, timing in times.items()]


def _child(run: Run, package: str) -> list[dict[str, Any]]:
    """What a process of its own measures of a package's optimizers, as far as it gets."""
    code = [sys.executable, "-m", "experiments.paging.rival_child", package, str(run.device), str(int(run.quick))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            code, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST
        )
        out, ended = (
            done.stdout,
            f"ended with {done.returncode}: {done.stderr.strip()[-600:]}" if done.returncode else "",
        )
    except subprocess.TimeoutExpired as error:
        held = error.stdout or b""
        out, ended = held.decode() if isinstance(held, bytes) else held, f"was stopped after {LONGEST} s"
    found = results(out)
    if ended:
        run.left_out.append(f"{package}: its process {ended}")
        run.say(f"{package}: its process {ended}")
    for row in found:
        run.say(f"{row['name']}, {row['what']}: {row['wall']['median'] / 1e3:,.1f} ms")
    return found


def results(output: str) -> list[dict[str, Any]]:
    """The rows among what a child printed.

    >>> results('noise\\nrow: {"name": "a"}\\n')
    [{'name': 'a'}]
    """
    lines = (line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK))
    return [dict(json.loads(line)) for line in lines]
