"""What is left of 1,000 lists that were made, used and dropped?

Answer: see notes/pointer_lifetime.md.

In a process of its own, after a tenth as many that are not counted: how much more there is on the device, in managed
memory, of the process in RAM, and how many descriptors more.  Captured ones are fewer: they take long.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run, mib
from experiments.works.fresh import rows_of
from experiments.works.held_lists import User, lists, minus
from pagedopt import DeviceTable, PagedSGD, Sweep
from pagedopt.system import driver

MEASURES = ("launch", "tables")
COUNT, CAPTURES, LIMIT = 1000, 50, 120.0


def table(user: User) -> None:
    """Its rows are lent once."""
    with DeviceTable(lists(user), writes=[0]).rows_on_device():
        pass


def optimizer(user: User) -> None:
    """With a step."""
    PagedSGD(user.params, lr=1.0, momentum=0.9).step()


def captured(user: User) -> None:
    """Replayed once."""
    sweep = Sweep(minus, lists(user))
    sweep.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sweep.run({})
    graph.replay()


KINDS: dict[str, Callable[[User], Any]] = {
    "DeviceTable": table,
    "Sweep": lambda user: Sweep(minus, lists(user)).run({}),
    "PagedSGD": optimizer,
    "captured Sweep": captured,
}


def now(device: torch.device) -> dict[str, int]:
    """What there is, after everything that nobody has was let go."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = {"ram": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
             "descriptors": len(os.listdir("/proc/self/fd"))}  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        found |= {"card": total - free, "managed": driver.managed_bytes(device.index)}
    return found


def left(counts: dict[str, int], name: str) -> Iterator[Row]:
    """In the child: of each kind make, use and drop so many, after a tenth as many that are not counted."""
    device = torch.device(name)
    user = User.of(20, 100, device)
    for kind, count in counts.items():
        for _ in range(max(1, count // 10)):
            KINDS[kind](user)
        before = now(device)
        for _ in range(count):
            KINDS[kind](user)
        yield {"kind": kind, "count": count, "device": device.type,
               **{key: value - before[key] for key, value in now(device).items()}}  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """A row per kind: bytes and descriptors that are left.  Nobody else measures meanwhile: the card is everybody's."""
    kinds = [kind for kind in KINDS if run.device.type == "cuda" or "captured" not in kind]
    counts = {kind: CAPTURES if "captured" in kind else COUNT for kind in kinds}
    return rows_of(run, left, run.size(counts, {kinds[0]: 20}), str(run.device), limit=LIMIT)


def most(rows: Rows) -> float | None:
    """The most bytes that a kind left anywhere, in MiB."""
    found = [row[name] for row in rows for name in ("ram", "card", "managed") if name in row]
    return max(found) / 2**20 if found else None


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("left on {device}", rows, {"kind": "kind", "made": "count", "MiB of RAM": mib("ram"),
        "MiB of the card": mib("card"), "MiB managed": mib("managed"), "descriptors": "descriptors"})  # fmt: skip
    page.bar("bytes that a kind of list leaves behind", rows, most, at_most=1.0, unit="MiB")
    page.bar("descriptors that a kind of list leaves behind", rows, "descriptors", at_most=0)
