"""State in a file under a budget of RAM, on a CPU: how much stays resident, is it right, and what does a step cost?

Answer (the host of an H200, 2026-11): what is resident is the budget and 29 MiB, bits do not depend on it, and a step
costs what its disk gives: 2 GB/s to and fro.

Every contender runs in a process of its own, of which the kernel says the most that was resident.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.child import only
from experiments.clock import series
from experiments.columns import gb_per_s, mib, ms
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.works.models import Work
from experiments.works.paged import STATE_BYTES, adamw, placed
from experiments.works.states import digest, state_tensors
from experiments.works.weight import high_water
from pagedopt.system.host import file_system
from pagedopt.system.state_file import state_folder

MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements", "system/state_file.py")
#: (tensors, elements of each): 67 M parameters, 537 MB of state, so that what is not dropped shows.
FULL, QUICK = (16, 2048**2), (16, 512**2)
#: Shares of state that stay in RAM; None: plain RAM, no file.
SHARES = (None, 1.0, 0.5, 0.25, 0.0)
IN_RAM = "all in RAM"
STEPS, WARM = 4, 1
LONGEST = 240
#: Bytes written to the disk between two calls of fdatasync.
BLOCK = 32 << 20
#: Kinds of rows.
STATE, DISK = "state", "disk"
#: A folder for state files, which raises ValueError where there is none.
needs = state_folder


def measure(run: Run) -> Iterator[Row]:
    """Rows by share in RAM: resident bytes beyond those before, times (µs), digests; and what the disk gives."""
    tensors, numel = run.size(FULL, QUICK)
    state = STATE_BYTES * tensors * numel
    for share in run.each(run.size(SHARES, (None, 0.25))):
        name = IN_RAM if share is None else f"file, {share:.0%} in RAM"
        with run.attempt(name):
            budget = None if share is None else int(share * state)
            about = {"kind": STATE, "name": name, "share": share, "budget": budget, "numel": tensors * numel}
            row = {**about, "state_bytes": state, **only(steps, tensors, numel, budget, limit=LONGEST)}
            run.say(f"{name}: {row['resident']:,} bytes resident, {row['step']['median'] / 1e3:,.0f} ms a step")
            yield row
    folder, nbytes = state_folder(), min(state, 256 << 20)
    row = {"kind": DISK, "file_system": file_system(folder), "bytes": nbytes, "clock": "wall"}
    yield {**row, **disk(folder, nbytes)}


def disk(folder: Path, nbytes: int) -> Row:
    """Bytes a second of a file that is written through to the disk, and then read, dropped from the cache before."""
    block, rates = memoryview(bytearray(os.urandom(min(BLOCK, nbytes)))), {}
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for way, each in (("write", file.write), ("read", file.readinto)):
            file.seek(0)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache is measured
            begin = time.perf_counter()
            for _ in range(nbytes // len(block)):
                each(block)
                os.fdatasync(file.fileno())
            rates[way] = nbytes // len(block) * len(block) / (time.perf_counter() - begin)
    return rates


# --- in a process of its own


def parameters(tensors: int, numel: int) -> list[torch.nn.Parameter]:
    """The same random parameters and gradients every time."""
    return Work("flat", [(numel,)] * tensors, torch.float32, 28, 5e-5).parameters(torch.device("cpu"))


def steps(tensors: int, numel: int, budget: int | None) -> Iterator[Row]:
    """What the steps took, and the most that was in RAM until they were done."""
    params, warm = parameters(tensors, numel), parameters(1, 4096)
    options: dict[str, Any] = {} if budget is None else {"placement": "file", "device_budget": budget}
    for _ in range(2):  # compiles the kernel, wakes the threads: what the first step ever takes is not the state's
        adamw(warm, **options | ({"device_budget": 0} if options else {})).step()
    before = high_water(reset=True)
    optimizer = adamw(params, **options)
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        optimizer.step()
        taken.append((time.perf_counter() - begin) * 1e6)
    peak = high_water()
    if before is None or peak is None:
        raise RuntimeError("this system does not say how much of a process is in RAM (VmHWM)")
    bits = digest([*params, *state_tensors(optimizer)])
    times = {"first_step": series(taken[:WARM], "wall"), "step": series(taken[WARM:], "wall")}
    yield {
        "before": before,
        "peak": peak,
        "resident": max(0, peak - before),
        "digest": bits,
        **times,
        **placed(optimizer.memory_report()),
    }


def derive(rows: Rows) -> Rows:
    """What the disk gives beside every row, what is in RAM beyond a budget (MiB), and whether bits are the same."""
    right = (rows.first(name=IN_RAM) or {}).get("digest")
    disk = {f"disk_{way}": rows.number(way, kind=DISK) for way in ("write", "read")}
    found = Rows()
    for row in rows.where(kind=STATE):
        bits = "same" if row["digest"] == right else "different"
        beyond = (row["resident"] - (row["budget"] or 0)) / 2**20
        found.append({**row, **disk, "in_file": row.get("on file", 0), "beyond": beyond, "bits": bits})
    return found


def title(rows: Rows) -> str:
    """How much state there is, and the disk."""
    row, disk = rows[0], "the disk was not measured"
    if row["disk_write"] is not None:
        disk = f"the disk writes {row['disk_write'] / 1e9:.2f} GB/s and reads {row['disk_read'] / 1e9:.2f} GB/s"
    return f"CPU, {row['numel'] / 1e6:,.0f} M parameters, {row['state_bytes'] / 2**20:,.0f} MiB of state; {disk}"


COLUMNS: dict[str, Column] = {
    "state": "name",
    "budget, MiB": mib("budget"),
    "resident, MiB": mib("resident"),
    "in the file, MiB": mib("in_file"),
    "step, ms": ms("step"),
    "GB/s to and fro": gb_per_s(lambda row: 2 * row["in_file"], "step"),
    "bits": "bits",
}
BEYOND = "CPU, state file, a quarter in RAM: resident beyond the budget"
DIFFERENT = "CPU, state file: budgets whose bits differ from all in RAM"


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table(title, rows, COLUMNS)
    page.bar(BEYOND, rows.where(share=0.25), "beyond", "≤ 64 MiB")
    page.bar(DIFFERENT, rows, lambda rows: float(sum(row["bits"] != "same" for row in rows)), "≤ 0")
