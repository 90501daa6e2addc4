"""Part ``cpu``: state in a file under a budget of RAM: how much stays resident, is it right, what does a step cost?

Every contender runs in a process of its own (:mod:`experiments.paging.state_file_child`), whose resident size is read
from outside, every few milliseconds, and from the kernel's own high-water mark.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from experiments.paging.problem import STATE_BYTES, Run
from experiments.report import ROOT
from pagedopt.planning.rates import file_rates
from pagedopt.system.mounts import file_system
from pagedopt.system.state_file import state_folder

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
#: What the child says: steps begin, steps are done, results.
BEGIN, DONE, END = "begin", "done", "end: "
LONGEST = 240
#: Seconds for writing to the disk, and for reading from it.
DISK_SECONDS = 2.0
PAGE = os.sysconf("SC_PAGE_SIZE")


def part(run: Run) -> dict[str, Any]:
    """Rows by share in RAM: resident bytes beyond those before, times, digests; and what the disk gives."""
    tensors, numel = QUICK if run.quick else FULL
    state = STATE_BYTES * tensors * numel
    rows: list[dict[str, Any]] = []
    for share in QUICK_SHARES if run.quick else SHARES:
        name = IN_RAM if share is None else f"file, {share:.0%} in RAM"
        with run.attempt(name):
            budget = None if share is None else int(share * state)
            rows.append({"name": name, "share": share, "budget": budget, **_child(tensors, numel, budget)})
            row = rows[-1]
            run.say(f"{name}: {row['resident']:,} bytes resident, {row['median_ms']:,.0f} ms a step")
    known = {row["name"]: row["digest"] for row in rows}
    different = sorted(name for name, found in known.items() if found != known.get(IN_RAM))
    for name in different:
        run.say(f"{name}: DIFFERENT BITS than all in RAM")
    return {
        "numel": tensors * numel, "state_bytes": state, "rows": rows, "different": different,
        "disk": disk_rates(state_folder(), min(state, 256 << 20)),
    }  # fmt: skip


def _child(tensors: int, numel: int, budget: int | None) -> dict[str, Any]:
    """What a fresh process finds, and the most that was resident while it did.

    Raises:
        RuntimeError: the process failed; with its last words.
    """
    code = [sys.executable, "-m", "experiments.paging.state_file_child", json.dumps([tensors, numel, budget, STEPS])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(code, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        stopper = threading.Timer(LONGEST, child.kill)
        stopper.start()
        try:
            found, seen = _follow(child)
        finally:
            stopper.cancel()
            child.kill()
            child.wait()
        if found is None:
            errors.seek(0)
            raise RuntimeError(f"its process ended with {child.returncode}: {errors.read().strip()[-600:]}")
    times = found["ms"][WARM:]
    peak = max(seen, found["high_water"] or 0)
    return {
        **found, "seen": seen, "peak": peak, "resident": max(0, peak - found["before"]),
        "median_ms": statistics.median(times),
    }  # fmt: skip


def _follow(child: subprocess.Popen[str]) -> tuple[dict[str, Any] | None, int]:
    """What the child reports, and the largest resident size between its two marks."""
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
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == BEGIN:
            watcher.start()
        elif line.strip() == DONE:
            stop.set()
        elif line.startswith(END):
            found = json.loads(line.removeprefix(END))
    stop.set()
    if watcher.is_alive():
        watcher.join()
    return found, max(sizes, default=0)


def resident(process: int | str = "self") -> int | None:
    """Bytes of a process that are in RAM, its shared and file-backed pages too; None if it has gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return None


def disk_rates(folder: Path, nbytes: int) -> dict[str, Any]:
    """Bytes a second that a file takes (written through) and gives (dropped from the cache before)."""
    write, read = file_rates(folder, nbytes, DISK_SECONDS)
    return {"file_system": file_system(folder), "bytes": nbytes, "write": write, "read": read}
