"""State in a file under a budget of RAM, on a CPU: how much stays resident, is it right, and what does a step cost?

Answer (the host of an H200, 2026-11): what is resident is the budget and 29 MiB, bits do not depend on it, and a step
costs what its disk gives: 2 GB/s to and fro.

Every contender runs in a process of its own, whose resident size is read from outside, every few milliseconds, and from
the kernel's own high-water mark.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.harness.child import Child
from experiments.harness.columns import mib, ms
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table
from experiments.harness.time import Stats
from experiments.works.paged import STATE_BYTES, adamw, digest, placed, state_tensors
from pagedopt.planning.rates import file_rates
from pagedopt.system.files.mounts import file_system
from pagedopt.system.files.state_file import state_folder

#: (tensors, elements of each): 67 M parameters, 537 MB of state, so that what is not dropped shows.
FULL, QUICK = (16, 2048**2), (16, 512**2)
#: Shares of state that stay in RAM; None: plain RAM, no file.
SHARES = (None, 1.0, 0.5, 0.25, 0.0)
QUICK_SHARES = (None, 0.25)
IN_RAM = "all in RAM"
BAR_SHARE = 0.25
STEPS, WARM = 4, 1
#: Seconds between two readings of the resident size.
PAUSE = 0.002
#: What the child says: steps begin, steps are done.
BEGIN, DONE = {"mark": "begin"}, {"mark": "done"}
LONGEST = 240
#: Seconds for writing to the disk, and for reading from it.
DISK_SECONDS = 2.0
PAGE = os.sysconf("SC_PAGE_SIZE")
PROCESS = Path("/proc/self")
#: Kinds of rows.
STATE, DISK = "state", "disk"
FORMER = "cpu"


def needs() -> None:
    """A folder for state files.

    Raises:
        ValueError: there is none.
    """
    state_folder()


def measure(run: Run) -> Iterator[Row]:
    """Rows by share in RAM: resident bytes beyond those before, times (µs), digests; and what the disk gives."""
    tensors, numel = run.size(FULL, QUICK)
    state = STATE_BYTES * tensors * numel
    for share in run.each(run.size(SHARES, QUICK_SHARES)):
        name = IN_RAM if share is None else f"file, {share:.0%} in RAM"
        with run.attempt(name):
            budget = None if share is None else int(share * state)
            about = {"kind": STATE, "name": name, "share": share, "budget": budget, "numel": tensors * numel}
            row = {**about, "state_bytes": state, **_followed(tensors, numel, budget)}
            run.say(f"{name}: {row['resident']:,} bytes resident, {row['step']['median'] / 1e3:,.0f} ms a step")
            yield row
    folder, nbytes = state_folder(), min(state, 256 << 20)
    write, read = file_rates(folder, nbytes, DISK_SECONDS)  # written through; dropped from the cache before it is read
    yield {"kind": DISK, "file_system": file_system(folder), "bytes": nbytes, "write": write, "read": read}


def _followed(tensors: int, numel: int, budget: int | None) -> Row:
    """What a fresh process finds, and the most that was resident between its two marks.

    Raises:
        RuntimeError: the process failed; with its last words.
    """
    child = Child(steps, tensors, numel, budget, limit=LONGEST)
    sizes: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            if (size := resident(child.pid)) is None:
                return
            sizes.append(size)
            time.sleep(PAUSE)

    watcher = threading.Thread(target=watch, daemon=True)
    found = None
    for row in child:
        if row == BEGIN:
            watcher.start()
        elif row == DONE:
            stop.set()
        else:
            found = row
    stop.set()
    if watcher.is_alive():
        watcher.join()
    if found is None or child.ended:
        raise RuntimeError(f"its process {child.ended}")
    seen = max(sizes, default=0)
    peak = max(seen, found["high_water"] or 0)
    return {**found, "seen": seen, "peak": peak, "resident": max(0, peak - found["before"])}


def resident(process: int | str = "self") -> int | None:
    """Bytes of a process that are in RAM, its shared and file-backed pages too; None if it has gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return None


# --- in a process of its own


def parameters(tensors: int, numel: int) -> list[torch.nn.Parameter]:
    """The same random parameters and gradients every time."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(tensors):
        parameter = torch.nn.Parameter(torch.empty(numel).normal_(0, 0.02, generator=generator))
        parameter.grad = torch.empty(numel).normal_(0, 1e-3, generator=generator)
        found.append(parameter)
    return found


def options_of(budget: int | None) -> dict[str, Any]:
    """Plain RAM, or a file of which so many bytes stay in RAM."""
    return {} if budget is None else {"placement": "file", "device_budget": budget}


def reset_high_water() -> None:
    """Let the kernel's high-water mark of the resident size begin anew."""
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def high_water() -> int | None:
    """The most bytes that were resident since then."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def steps(tensors: int, numel: int, budget: int | None) -> Iterator[Row]:
    """Two marks, and a row of what the steps between them took."""
    params = parameters(tensors, numel)
    warm = parameters(1, 4096)
    for _ in range(2):  # compiles the kernel, wakes the threads: what the first step ever takes is not the state's
        adamw(warm, **options_of(None if budget is None else 0)).step()
    reset_high_water()
    before = resident()
    yield BEGIN
    optimizer = adamw(params, **options_of(budget))
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        optimizer.step()
        taken.append((time.perf_counter() - begin) * 1e3)
    peak, after = high_water(), resident()
    yield DONE
    bits = digest([*params, *state_tensors(optimizer)])
    places = placed(optimizer.memory_report())
    yield {"before": before, "high_water": peak, "after": after, "digest": bits, **_times(taken), **places}


def _times(milliseconds: list[float]) -> Row:
    """Cells (µs): the first step, which loads things, and those behind it."""
    taken = [1e3 * ms for ms in milliseconds]
    return {"first_step": taken[0], "step": vars(Stats.of(taken[WARM:]))}


# --- table, bar


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    sizes = {"numel": part["numel"], "state_bytes": part["state_bytes"]}
    rows: list[Row] = [
        {"kind": STATE, **{name: cell for name, cell in row.items() if name not in ("ms", "by_place", "measured")},
         **sizes, **_times(row["ms"]), **{f"on {place}": nbytes for place, nbytes in row["by_place"].items()}}
        for row in part["rows"]
    ]  # fmt: skip
    return [*rows, {"kind": DISK, **part["disk"]}]


def derive(rows: Rows) -> Rows:
    """What the disk gives beside every row, whether its bits are those of all in RAM, and bytes to and fro a second."""
    right = (rows.first(name=IN_RAM) or {}).get("digest")
    disk = {f"disk_{way}": rows.number(way, kind=DISK) for way in ("write", "read")}
    found = Rows()
    for row in rows.where(kind=STATE):
        away = row.get("on file", 0)
        rate = 2 * away / row["step"]["median"] / 1e3 if away else None
        bits = "same" if row["digest"] == right else "different"
        found.append({**row, **disk, "in_file": away, "rate": rate, "bits": bits})
    return found


def title(rows: Rows) -> str:
    """How much state there is, and the disk."""
    row, disk = rows[0], "the disk was not measured"
    if row["disk_write"] is not None:
        disk = f"the disk writes {row['disk_write'] / 1e9:.2f} GB/s and reads {row['disk_read'] / 1e9:.2f} GB/s"
    return f"CPU, {row['numel'] / 1e6:,.0f} M parameters, {row['state_bytes'] / 2**20:,.0f} MiB of state; {disk}"


TABLES = [
    Table(title, {
        "state": "name", "budget, MiB": mib("budget"), "resident, MiB": mib("resident"),
        "in the file, MiB": mib("in_file"), "step, ms": ms("step"), "GB/s to and fro": "rate", "bits": "bits",
    })
]  # fmt: skip
BARS = [
    Bar("CPU, state file, a quarter in RAM: resident beyond the budget",
        lambda rows: (rows[0]["resident"] - rows[0]["budget"]) / 2**20, at_most=64, unit="MiB", share=BAR_SHARE),
    Bar("CPU, state file: budgets whose bits differ from all in RAM",
        lambda rows: float(sum(row["bits"] != "same" for row in rows)), at_most=0),
]  # fmt: skip
