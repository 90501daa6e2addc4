"""Is a pointer the same number on the CPU and on the GPU, and may both follow it?

Answer: see notes/copies.md.

For each kind of memory its address as each side has it.  Then each side is told to read a byte there, in a process of
its own for each kind, as a number that one side may not follow ends the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from experiments.child import Child
from experiments.lab import Page, Row, Rows, Run
from experiments.works.memory_kinds import KINDS, memory

VALUE, LIMIT = 7, 60.0
#: What a kernel finds: the number that it was given, and the byte there.
CUDA = r"""
extern "C" __global__ void look(const unsigned char* at, unsigned long long* seen, int follow) {
    seen[0] = (unsigned long long)at;
    seen[1] = follow ? *at : 0;
}
"""
CPU, GPU = "cpu_reads", "gpu_reads"
RIGHT, MAY_NOT = "right", "ends the process"


def looked(kind: str, side: str) -> Iterator[Row]:
    """In the child: the numbers, and whether one side finds the byte there; a number that it may not follow ends it."""
    import cupy

    found = memory(kind)
    found.fill(VALUE)
    seen = torch.zeros(2, dtype=torch.int64, device="cuda")
    kernel: Any = cupy.RawKernel(CUDA, "look")
    kernel((1,), (1,), (found.address, seen.data_ptr(), np.int32(0)))
    same = None if None in (found.cpu, found.gpu) else found.cpu == found.gpu
    yield {"cpu": found.cpu, "gpu": found.gpu, "same": same, "seen": int(seen[0]) == found.address}
    if side == GPU:
        kernel((1,), (1,), (found.address, seen.data_ptr(), np.int32(1)))
    value = int(seen[1]) if side == GPU else ctypes.string_at(found.address, 1)[0]
    yield {side: RIGHT if value == VALUE else "wrong"}


def in_children(kind: str) -> Row:
    """What both sides make of a kind of memory."""
    row: Row = {"kind": kind, CPU: MAY_NOT, GPU: MAY_NOT}
    for side in (CPU, GPU):
        for more in Child(looked, kind, side, limit=LIMIT):
            row |= more
    return row


def on_cpu() -> Row:
    """One tensor, as torch, NumPy and a compiled kernel have it."""
    import numba

    from pagedopt import kernels

    pointer: Any = kernels.pointer
    tensor = torch.full((4,), VALUE, dtype=torch.uint8)

    @numba.njit
    def look(at):
        return at, numba.carray(pointer(at), 1, np.uint8)[0]

    seen, value = look(tensor.data_ptr())
    same = tensor.data_ptr() == tensor.numpy().ctypes.data
    return {"kind": "pageable (torch, NumPy, Numba)", "cpu": tensor.data_ptr(), "gpu": None, "same": same,
            "seen": seen == tensor.data_ptr(), CPU: RIGHT if value == VALUE else "wrong", GPU: "-"}  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """A row per kind of memory: both addresses, and what each side reads through the one that a copy is given."""
    if run.device.type == "cpu":
        run.left_out.append("pinned, managed and device memory: need a GPU")
        yield {**on_cpu(), "device": "cpu"}
        return
    with ThreadPoolExecutor(min(len(KINDS), os.cpu_count() or 1)) as pool:
        for _, row in zip(run.each(KINDS), pool.map(in_children, KINDS), strict=True):
            yield {**row, "device": "cuda"}


def derive(rows: Rows) -> Rows:
    """And a row of sums: of how many kinds both sides have an address, and of how many it is the same number."""
    both = [row for row in rows if row.get("same") is not None]
    kinds = ", ".join(row["kind"] for row in rows if row[CPU] == RIGHT and row[GPU] == RIGHT)
    sums = {"what": "sum", "both": len(both), "same": sum(row["same"] for row in both), "shared": kinds or "none"}
    return Rows([*({**row, "what": "kind"} for row in rows), sums])


def hexadecimal(column: str) -> Callable[[Row], str]:
    """An address."""
    return lambda row: "-" if row.get(column) is None else f"{row[column]:#x}"


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("addresses on {device}", rows.where(what="kind"),
        {"memory": "kind", "for the CPU": hexadecimal("cpu"), "for the GPU": hexadecimal("gpu"),
        "the same": lambda row: "-" if row.get("same") is None else ("no", "yes")[row["same"]],
        "the CPU reads there": CPU, "the GPU reads there": GPU})  # fmt: skip
    page.bar("kinds of memory in which the two numbers differ", rows.where(what="sum"),
        lambda rows: float(rows[0]["both"] - rows[0]["same"]), at_most=0)  # fmt: skip
