"""Is a pointer the same number on the CPU and on the GPU, and why has a copy an argument for its direction?

Answer: see notes/copies.md.

For each kind of memory its address as each side has it.  Then each side is told to read a byte there.  And every kind
is copied into every other, by each direction; the documentation calls a direction that does not fit undefined: this is
what one driver does.  All of it in processes of their own: a number that one side may not follow ends the process, and
that is an outcome.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.child import Child
from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import Matrix

ANSWERS = {"addresses": "copies", "direction": "copies"}
NEEDS_GPU = True
LIMIT, VALUE, RIGHT = 60.0, 7, "right"


def measure(run: Run) -> Iterator[Row]:
    """A row per kind of memory: both addresses, and what each side reads; or per call, direction and pair of kinds."""
    if run.part == "direction":
        yield from directions(run)
    else:
        with ThreadPoolExecutor(min(len(KINDS), os.cpu_count() or 1)) as pool:
            for _, row in zip(run.each(KINDS), pool.map(addressed, KINDS), strict=True):
                yield {**row, "device": "cuda"}


# --- memory of every kind, in the process of a child

NBYTES = 1 << 18
KINDS = PAGEABLE, PINNED, REGISTERED, MANAGED, DEVICE, RANGE = (
    "pageable", "pinned", "registered", "managed", "device", "mapped range, page on the host",
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """So many bytes of a kind: the addresses that the CPU and the GPU use (None: it has none), and what holds them."""

    kind: str
    cpu: int | None
    gpu: int | None
    owner: Any

    @property
    def address(self) -> int:
        """To be given to a copy."""
        return (self.cpu if self.gpu is None else self.gpu) or 0

    def fill(self, value: int) -> None:
        """Set every byte, from the side that can."""
        from pagedopt.system.driver import call

        if self.gpu is None:
            ctypes.memset(self.cpu or 0, value, NBYTES)
        else:
            call("cuMemsetD8", self.gpu, value, NBYTES)
            call("cuCtxSynchronize")

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Every byte, through a copy of a direction that is right."""
        from pagedopt.system.driver import call

        found = np.empty(NBYTES, np.uint8)
        if self.gpu is None:
            ctypes.memmove(found.ctypes.data, self.cpu or 0, NBYTES)
        else:
            call("cuMemcpyDtoH", found.ctypes.data, self.gpu, NBYTES)
        return found


def memory(kind: str, device: int = 0) -> Memory:
    """Memory of a kind; the GPU's address is what the driver says."""
    import torch

    from pagedopt.system import driver, virtual

    torch.cuda.set_device(device)
    torch.empty(1, device="cuda")  # makes the context
    if kind in (PAGEABLE, REGISTERED):
        host = np.empty(NBYTES, np.uint8)
        at = host.ctypes.data
        if kind == PAGEABLE:
            return Memory(kind, at, None, host)
        driver.call("cuMemHostRegister", at, NBYTES, driver.bindings().CU_MEMHOSTREGISTER_DEVICEMAP)
        return Memory(kind, at, int(driver.call("cuMemHostGetDevicePointer", at, 0)), host)
    if kind in (PINNED, MANAGED):
        buffer = (driver.allocate_mapped if kind == PINNED else driver.allocate_managed)(NBYTES, device)
        return Memory(kind, int(buffer.host.ctypes.data), buffer.address, buffer)
    if kind == DEVICE:
        tensor = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
        return Memory(kind, None, tensor.data_ptr(), tensor)
    size = virtual.granule(driver.Location.HOST, device)
    found = virtual.Range(size, device)
    found.give(0, size, driver.Location.HOST)
    return Memory(kind, None, found.address, found)


# --- addresses

#: What a kernel finds: the number that it was given, and the byte there.
CUDA = r"""
extern "C" __global__ void look(const unsigned char* at, unsigned long long* seen, int follow) {
    seen[0] = (unsigned long long)at;
    seen[1] = follow ? *at : 0;
}
"""
CPU, GPU, MAY_NOT = "cpu_reads", "gpu_reads", "ends the process"


def looked(kind: str, side: str) -> Iterator[Row]:
    """In the child: the numbers, and whether one side finds the byte there; a number that it may not follow ends it."""
    import cupy
    import torch

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


def addressed(kind: str) -> Row:
    """What both sides make of a kind of memory."""
    row: Row = {"kind": kind, CPU: MAY_NOT, GPU: MAY_NOT}
    for side in (CPU, GPU):
        for more in Child(looked, kind, side, limit=LIMIT):
            row |= more
    return row


# --- directions

DIRECTIONS = ("HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice", "Default")
SYNC, ASYNC, NONE = "cudaMemcpy", "cudaMemcpyAsync", "cuMemcpyAsync"
#: The call, and its direction: the driver's has none.
CALLS = [(call, direction) for call in (SYNC, ASYNC) for direction in DIRECTIONS] + [(NONE, "none")]
PAIRS = [(source, target) for source in KINDS for target in KINDS]
CRASH, WRONG, PROCESSES = "crash", "wrong data", 6
#: What is there of either side; managed memory and ranges are both.
SIDES = {"Host": (PAGEABLE, PINNED, REGISTERED, MANAGED), "Device": (DEVICE, MANAGED, RANGE)}


def fits(source: str, target: str, direction: str) -> bool:
    """Whether a direction says what the two are."""
    one, _, other = direction.partition("To")
    return not other or (source in SIDES[one] and target in SIDES[other])


def tried(call: str, direction: str, first: int) -> Iterator[Row]:
    """In the child: pair after pair; a context that is broken ends it."""
    import torch
    from cuda.bindings import driver, runtime

    sources, targets = ({kind: memory(kind) for kind in KINDS} for _ in range(2))
    stream = torch.cuda.current_stream().cuda_stream
    kind: Any = getattr(runtime.cudaMemcpyKind, f"cudaMemcpy{direction}", None)
    for source, target in PAIRS[first:]:
        one, other = sources[source], targets[target]
        one.fill(VALUE)
        other.fill(0)
        if call == NONE:
            (code,) = driver.cuMemcpyAsync(other.address, one.address, NBYTES, stream)
        elif call == SYNC:
            (code,) = runtime.cudaMemcpy(other.address, one.address, NBYTES, kind)
        else:
            (code,) = runtime.cudaMemcpyAsync(other.address, one.address, NBYTES, kind, stream)
        (after,) = driver.cuCtxSynchronize()
        bad = code if int(code) else after
        outcome = f"error {int(bad)}" if int(bad) else RIGHT if bool((other.read() == VALUE).all()) else WRONG
        yield {"source": source, "target": target, "outcome": outcome, "said": bad.name if int(bad) else ""}
        if int(after):
            return


def every_pair(call: str, direction: str) -> list[Row]:
    """All pairs by one call; behind one that ended its process the next begins in another, so many times."""
    rows: list[Row] = []
    for _ in range(PROCESSES):
        if len(rows) == len(PAIRS):
            break
        child = Child(tried, call, direction, len(rows), limit=LIMIT)
        rows += child
        if child.ended and child.ended.startswith("ended with 1:"):
            raise RuntimeError(child.ended)
        if child.ended and len(rows) < len(PAIRS):
            source, target = PAIRS[len(rows)]
            rows.append({"source": source, "target": target, "outcome": CRASH, "said": child.ended[:100]})
    about = {"call": call, "direction": direction}
    return [{**about, **row, "fits": fits(row["source"], row["target"], direction)} for row in rows]


def directions(run: Run) -> Iterator[Row]:
    """A row per call, direction and pair of kinds."""
    with ThreadPoolExecutor(min(len(CALLS), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(every_pair, *call) for call in CALLS]
        for (call, direction), future in zip(run.each(CALLS), futures, strict=True):
            with run.attempt(f"{call}, {direction}"):
                rows = future.result()
                if missing := len(PAIRS) - len(rows):
                    run.leave_out(f"{call}, {direction}: the last {missing} pairs, after {PROCESSES} processes")
                yield from rows


# --- what follows


def derive(rows: Rows) -> Rows:
    """And sums: of how many kinds both sides have an address, and of how many it is the same number; of each direction
    how many pairs it fits, how many others are right all the same, refused, or worse.

    The first of several calls whose sums are alike has the names of all in ``calls``.
    """
    kinds = Rows(row for row in rows if "kind" in row)
    both = [row for row in kinds if row.get("same") is not None]
    found = [{**row, "what": "kind"} for row in kinds]
    if kinds:
        found.append({"what": "sum", "both": len(both), "same": sum(row["same"] for row in both)})
    pairs = Rows(row for row in rows if "kind" not in row)
    if not pairs:
        return Rows(found)
    sums = Rows(summed(group) for group in pairs.groups("call", "direction"))
    alike: dict[str, list[str]] = {}
    for group in sums.groups("call"):
        alike.setdefault(str([list(row.values())[2:] for row in group]), []).append(group[0]["call"])
    together = {calls[0]: " and ".join(calls) for calls in alike.values()}
    whole = {name: sum(row[name] for row in sums) for name in list(sums[0])[3:]}
    default = sum(row["failed"] for row in sums if row["direction"] in ("Default", "none"))
    for row in sums:
        row |= {"calls": together.get(row["call"]), "first": row["call"] in together}
    found += [{**row, "what": "pair", "shown": row["outcome"].removeprefix("error ")} for row in pairs]
    return Rows([*found, *sums, {"what": "all", **whole, "default": default}])


def summed(group: Rows) -> Row:
    """Pairs of one call and direction, counted."""
    fitting, other = group.where(fits=True), group.where(fits=False)
    right = len(other.where(outcome=RIGHT))
    worse = len(other.where(outcome=WRONG)) + len(other.where(outcome=CRASH))
    about = {"what": "sum", "call": group[0]["call"], "direction": group[0]["direction"], "fitting": len(fitting)}
    failed, refused = len(fitting) - len(fitting.where(outcome=RIGHT)), len(other) - right - worse
    return {**about, "failed": failed, "others": len(other), "right": right, "worse": worse, "refused": refused}


PANELS = [
    Matrix(title=direction, down="source", across="target", text="shown", hatch=lambda row: not row["fits"],
           good=(RIGHT,), bad=(WRONG, CRASH),
           where={"direction": direction, "call": NONE if direction == "none" else ASYNC})
    for direction in (*DIRECTIONS, "none")
]  # fmt: skip
TITLE = """cudaMemcpyAsync (none: cuMemcpyAsync) from one kind of memory (down) to another
green: right; yellow: refused, with error 1; red: wrong or a crash; hatched: the direction does not fit"""


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    if page.section == "addresses":
        page.table("addresses on {device}", rows.where(what="kind"),
            {"memory": "kind", "the same": lambda row: "-" if row.get("same") is None else ("no", "yes")[row["same"]],
            "the CPU reads there": CPU, "the GPU reads there": GPU})  # fmt: skip
        page.bar("kinds of memory in which the two numbers differ", rows.where(what="sum"),
            lambda rows: float(rows[0]["both"] - rows[0]["same"]), "≤ 0")  # fmt: skip
        return
    page.table("{calls}: pairs of six kinds of memory, by direction", rows.where(first=True),
        {"direction": "direction", "pairs that it fits": "fitting",
        "other pairs": "others", "right all the same": "right", "refused": "refused",
        "wrong data or a crash": "worse"}, by=("calls", ))  # fmt: skip
    page.picture("directions", rows.where(what="pair"), PANELS, TITLE)
    page.bar("copies without a direction, or by Default, that are not right", rows.where(what="all"), "default", "≤ 0")
