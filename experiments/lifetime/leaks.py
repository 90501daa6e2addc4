"""What is left of 1,000 lists that were made, used and dropped?

Answer: see notes/pointer_lifetime.md.

In a process of its own for each kind of list, after a tenth as many that are not counted: how much more there is on the
device, in managed memory, of the process in RAM, and how many descriptors more.  Of captured ones 50: they take long.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.harness.child import only
from experiments.lab import Bar, Row, Rows, Run, Table, mib
from experiments.works.held_lists import User, captured, lists, minus
from pagedopt import DeviceTable, PagedSGD, Sweep
from pagedopt.system.cuda import driver

COUNT, LIMIT = 1000, 120.0


def table(user: User) -> None:
    """Its rows are lent once."""
    with DeviceTable(lists(user), writes=[0]).rows_on_device():
        pass


def optimizer(user: User) -> None:
    """With a step."""
    PagedSGD(user.params, lr=1.0, momentum=0.9).step()


KINDS: dict[str, Callable[[User], Any]] = {
    "DeviceTable": table,
    "Sweep": lambda user: Sweep(minus, lists(user)).run({}),
    "PagedSGD": optimizer,
    "captured Sweep": lambda user: Sweep(minus, lists(user)).capture({}).replay(),
    "captured PagedSGD": lambda user: captured(PagedSGD, user)(),
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


def left(kind: str, count: int, name: str) -> Iterator[Row]:
    """In the child: make, use and drop so many."""
    device = torch.device(name)
    user, make = User.of(20, 100, device), KINDS[kind]
    for _ in range(max(1, count // 10)):
        make(user)
        user.optimizer = None
    before = now(device)
    for _ in range(count):
        make(user)
        user.optimizer = None
    yield {key: value - before[key] for key, value in now(device).items()}


def measure(run: Run) -> Iterator[Row]:
    """A row per kind: bytes and descriptors that are left.  One by one: a card's free memory is everybody's."""
    kinds = [kind for kind in KINDS if run.device.type == "cuda" or "captured" not in kind]
    for kind in run.each(kinds[:1] if run.quick else kinds):
        with run.attempt(kind):
            count = run.size(COUNT // 20 if "captured" in kind else COUNT, 20)
            asked = kind, count, str(run.device)
            found = next(left(*asked)) if run.quick else only(left, *asked, limit=LIMIT)
            yield {"kind": kind, "count": count, "device": run.device.type, **found}


def most(rows: Rows) -> float | None:
    """The most bytes that a kind left anywhere, in MiB."""
    found = [row[name] for row in rows for name in ("ram", "card", "managed") if name in row]
    return max(found) / 2**20 if found else None


TABLES = [
    Table("left on {device}", {
        "kind": "kind", "made": "count", "MiB of RAM": mib("ram"), "MiB of the card": mib("card"),
        "MiB managed": mib("managed"), "descriptors": "descriptors",
    }),
]  # fmt: skip
BARS = [
    Bar("bytes that a kind of list leaves behind", most, at_most=1.0, unit="MiB"),
    Bar("descriptors that a kind of list leaves behind", "descriptors", at_most=0),
]
