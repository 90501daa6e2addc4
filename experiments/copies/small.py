"""What does a short copy to the device cost the host, and does the call return before the device has moved?

Answer: see notes/copies.md.

A table of pointers is such a copy: 8 bytes for each tensor of each list.  Behind a held stream a call that returns has
put the bytes aside, or left them where they were for the device to fetch; one that does not waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import torch

from experiments.lab import Case, Page, Row, Rows, Run, cycles_per_us, number
from experiments.pictures import Lines
from pagedopt.system import driver

SIZES = (*[8 * 4**i for i in range(9)], 1 << 20)
HOLD_US = 50_000.0


def ways(size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Copies of so many bytes into a buffer that is there."""
    source, target = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        one, other = source.numpy(), target.numpy()
        return {
            "memcpy": partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size),
            "torch copy_": partial(target.copy_, source),
            "NumPy": lambda: other.__setitem__(slice(None), one),
        }
    from cuda.bindings import runtime

    pinned, stream = source.pin_memory(), torch.cuda.current_stream().cuda_stream
    kinds, to = runtime.cudaMemcpyKind, target.data_ptr()
    up, default = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDefault
    return {
        "torch, pageable": partial(target.copy_, source),
        "torch, pinned, non_blocking": partial(target.copy_, pinned, non_blocking=True),
        "cuMemcpyHtoDAsync, pageable": partial(driver.copy_to_device, to, source.data_ptr(), size, stream),
        "cuMemcpyHtoDAsync, pinned": partial(driver.copy_to_device, to, pinned.data_ptr(), size, stream),
        "cudaMemcpyAsync, HostToDevice": partial(runtime.cudaMemcpyAsync, to, pinned.data_ptr(), size, up, stream),
        "cudaMemcpyAsync, Default": partial(runtime.cudaMemcpyAsync, to, pinned.data_ptr(), size, default, stream),
    }


def returns(call: Callable[[], object], device: torch.device) -> bool | None:
    """Whether the call returns while its stream is held."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda._sleep(int(HOLD_US * cycles_per_us(device.index)))
    call()
    held = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    return held


def measure(run: Run) -> Iterator[Row]:
    """A row per size and way: the host's time, and whether the call returned."""
    run.rounds, run.seconds = run.size((200, 0.3), (3, 0.05))
    for size in run.each(run.size(SIZES, SIZES[:2])):
        found = ways(size, run.device)
        early = {name: returns(call, run.device) for name, call in found.items()}
        for name, host in run.host([Case(name, call) for name, call in found.items()]).items():
            yield {"case": name, "bytes": size, "device": run.device.type, "host": host, "returns": early[name]}


def shown(row: Row) -> str:
    """µs of the host; whether it waited."""
    return number(row["host"]["median"]) + (", waits" if row["returns"] is False else "")


SHOWN = Lines(title="What the host spends on one short copy", x="bytes", y="host", each="case", label="bytes")


def report(page: Page, rows: Rows) -> None:
    """A table and a picture."""
    page.grid("to {device}: µs of the host; waits: does not return while the stream is held", rows, "case",
        "bytes", shown, "bytes")  # fmt: skip
    page.picture("small", rows, [SHOWN])
