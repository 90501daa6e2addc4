"""What does each line of a little program start, and which line waits?

Answer (H200, 2026-11): a kernel and a launch each for +, cos and relu, which wait for nothing; making the tensor and
printing it wait for the device, in 2 and 4 places.

The lecture's five lines, one by one.  Who waits is found in two ways: torch's own warnings about synchronization, and a
stream that is held for a while: a line that takes as long has waited.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from experiments.clock import cycles_per_us
from experiments.lab import Page, Row, Rows, Run
from experiments.works.dispatch import dispatched
from experiments.works.trace import counted

LINES = ("x = torch.tensor([1, 2, 3], device=device)", "y = x + 1", "print(y)", "z = torch.cos(y)", "w = torch.relu(z)")
#: µs for which the stream is held.
HELD = 20_000


def measure(run: Run) -> Iterator[Row]:
    """A row per line."""
    names: dict[str, Any] = {"torch": torch, "device": run.device}
    for line in run.each(LINES):
        call = partial(exec, compile(line, "<line>", "exec"), names)
        with contextlib.redirect_stdout(io.StringIO()):  # what it prints is not shown
            call()
            words = ", ".join(f"{count} {name.removeprefix('aten::')}" for name, count in dispatched(call).items())
            row: Row = {"line": line, "device": run.device.type, "dispatched": words}
            if run.device.type == "cuda":
                with run.attempt(line, (Exception,)):
                    row |= {**counted(call).as_dict(), "warnings": warned(call), "clock": "host", "held": held(call)}
                    row["waited"] = row["held"] > HELD / 2
        yield row


def warned(call: Callable[[], None]) -> int:
    """How often torch warns that a call synchronizes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def held(call: Callable[[], None]) -> float:
    """µs until a call returns while the stream is held."""
    cycles = int(HELD * cycles_per_us(torch.cuda.current_device()))
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    begin = time.perf_counter()
    call()
    taken = (time.perf_counter() - begin) * 1e6
    torch.cuda.synchronize()
    return taken


def sentence(rows: Rows) -> str | None:
    """Which lines wait."""
    known = [row for row in rows if "waited" in row]
    waiting = ", ".join(f"`{row['line']}`" for row in known if row["waited"]) or "no line"
    return f"Waits for the GPU: {waiting}." if known else None


COLUMNS = {name: name for name in ("dispatched", "kernels", "copies")}
COLUMNS |= {"torch warns": "warnings", "µs behind a held stream": "held"}


def report(page: Page, rows: Rows) -> None:
    """A table and what follows."""
    page.table("line by line, {device}", rows, {"line": lambda row: f"`{row['line']}`", **COLUMNS})
    page.say(sentence(rows))
