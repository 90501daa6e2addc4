"""State in a file under a budget of RAM, on a CPU: how much stays resident, is it right, and what does a step cost?

Answer (the host of an H200, 2026-11): what is resident is the budget and 29 MiB, bits do not depend on it, and a step
costs what its disk gives: 2 GB/s to and fro.

Every contender runs in a process of its own, whose resident size is read from outside, every few milliseconds, and from
the kernel's own high-water mark.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.child import Child
from experiments.lab import Column, Page, Row, Rows, Run, gb_per_s, mib, ms, series
from experiments.works.models import Work
from experiments.works.paged import STATE_BYTES, adamw, digest, placed, state_tensors
from experiments.works.watch import watched
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
#: Seconds between two readings of the resident size.
PAUSE = 0.002
#: What the child says: steps begin, steps are done.
BEGIN, DONE = {"mark": "begin"}, {"mark": "done"}
LONGEST = 240
#: Bytes written to the disk between two calls of fdatasync.
FILE_BLOCK = 32 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
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
            row = {**about, "state_bytes": state, **_followed(tensors, numel, budget)}
            run.say(f"{name}: {row['resident']:,} bytes resident, {row['step']['median'] / 1e3:,.0f} ms a step")
            yield row
    folder, nbytes = state_folder(), min(state, 256 << 20)
    write, read = file_rates(folder, nbytes, 2.0)  # written through; dropped from the cache before it is read
    row = {"kind": DISK, "file_system": file_system(folder), "bytes": nbytes}
    yield {**row, "clock": "wall", "write": write, "read": read}


def _followed(tensors: int, numel: int, budget: int | None) -> Row:
    """What a fresh process finds, and the most that was resident between its two marks."""
    child = Child(steps, tensors, numel, budget, limit=LONGEST)
    sizes, found = [0], None
    with contextlib.ExitStack() as between:
        for row in child:
            if row == BEGIN:
                sizes = between.enter_context(watched(lambda: resident(child.pid), PAUSE))
            elif row == DONE:
                between.close()
            else:
                found = row
    if found is None or child.ended:
        raise RuntimeError(f"its process {child.ended}")
    peak = max(*sizes, found["high_water"] or 0)
    return {**found, "seen": max(sizes), "peak": peak, "resident": max(0, peak - found["before"])}


def resident(process: int | str = "self") -> int:
    """Bytes of a process that are in RAM, its shared and file-backed pages too; 0 if it has gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def file_rates(folder: Path, nbytes: int, seconds: float) -> tuple[float | None, float | None]:
    """The rates of writing and of reading an unnamed file of at most ``nbytes`` in ``folder``, each in ``seconds``.

    (None, None) if it cannot be written.
    """
    size = min(FILE_BLOCK, nbytes)
    block = memoryview(bytearray(os.urandom(size)))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            write = _blocks(lambda: _write_through(file.fileno(), block), nbytes // size, seconds)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache is measured
            read = _blocks(lambda: file.readinto(block), write[0], seconds)
    except OSError:
        return None, None
    return write[0] * size / write[1], read[0] * size / read[1]


def _write_through(file: int, block: memoryview) -> None:
    done = 0
    while done < len(block):
        done += os.write(file, block[done:])
    os.fdatasync(file)


def _blocks(run: Callable[[], object], most: int, seconds: float) -> tuple[int, float]:
    """Call ``run`` for ``seconds``, at least once and at most ``most`` times: how often, and the seconds they took."""
    begin = time.perf_counter()
    count, taken = 0, 0.0
    while count < most and (not count or taken < seconds):
        run()
        count, taken = count + 1, time.perf_counter() - begin
    return count, taken


# --- in a process of its own


def parameters(tensors: int, numel: int) -> list[torch.nn.Parameter]:
    """The same random parameters and gradients every time."""
    return Work("flat", [(numel,)] * tensors, torch.float32, 28, 5e-5).parameters(torch.device("cpu"))


def steps(tensors: int, numel: int, budget: int | None) -> Iterator[Row]:
    """Two marks, and a row of what the steps between them took."""
    params, warm = parameters(tensors, numel), parameters(1, 4096)
    options: dict[str, Any] = {} if budget is None else {"placement": "file", "device_budget": budget}
    for _ in range(2):  # compiles the kernel, wakes the threads: what the first step ever takes is not the state's
        adamw(warm, **options | ({"device_budget": 0} if options else {})).step()
    high_water(reset=True)
    before = resident()
    yield BEGIN
    optimizer = adamw(params, **options)
    taken = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        optimizer.step()
        taken.append((time.perf_counter() - begin) * 1e6)
    sizes = {"before": before, "high_water": high_water(), "after": resident()}
    yield DONE
    bits = digest([*params, *state_tensors(optimizer)])
    times = {"first_step": series(taken[:WARM], "wall"), "step": series(taken[WARM:], "wall")}
    yield {**sizes, "digest": bits, **times, **placed(optimizer.memory_report())}


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
    page.bar(BEYOND, rows.where(share=0.25), "beyond", at_most=64, unit="MiB")
    page.bar(DIFFERENT, rows, lambda rows: float(sum(row["bits"] != "same" for row in rows)), at_most=0)
