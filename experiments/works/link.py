"""The link and the memory behind it: copies, and a plain kernel that works in place.  What paging is held to."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from experiments.clock import Case
from experiments.lab import Row, Run, best
from pagedopt.kernels import cuda
from pagedopt.system import driver

#: Bytes of a copy in one direction; of a quick run.
SIZE, QUICK_SIZE = 1 << 30, 16 << 20
#: Thread blocks of the plain kernel: its best is what an update in place is held to.
BLOCKS = (8, 16, 32, 66, 132, 528)
THREADS = 512
UP, DOWN, BOTH, IN_PLACE = "up", "down", "both ways", "plain kernel in place"
#: How many copies' bytes each moves up and down.
MOVES = {UP: (1, 0), DOWN: (0, 1), BOTH: (1, 1), IN_PLACE: (2, 2)}

#: Each thread keeps four 16-byte loads in flight.
SOURCE = r"""
extern "C" __global__ void touch(float4* data, long long n)
{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += 4 * stride) {
        float4 v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (i + k * stride < n) v[k] = data[i + k * stride];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (i + k * stride < n) {
                v[k].x += 1; v[k].y += 1; v[k].z += 1; v[k].w += 1;
                data[i + k * stride] = v[k];
            }
    }
}
"""


@functools.cache
def touch_kernel() -> Any:
    """Reads and writes every float4 once; loaded when first used."""
    import cupy

    return cupy.RawKernel(SOURCE, "touch")


def touch(address: int, nbytes: int, blocks: int, device: torch.device) -> None:
    """Add one to every float of a range, where it lies, on the current stream."""
    stream = cuda.Stream(torch.cuda.current_stream(device).cuda_stream)
    touch_kernel()((blocks,), (THREADS,), (np.uint64(address), np.int64(nbytes // 16)), stream=stream)


class Link:
    """Page-locked memory and what can be done with it; freed with this object.

    Args:
        device: of the card.
        nbytes: of a copy in one direction; in place, twice as much is read and written.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.host = driver.allocate_mapped(2 * nbytes, device.index)
        noise = torch.empty(2 * nbytes // 4, device=device).normal_()
        driver.copy(self.host.address, noise.data_ptr(), 2 * nbytes, self._current())
        self.near = noise.view(torch.uint8)
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    @classmethod
    def of(cls, run: Run) -> Link:
        """The link of the device that is measured."""
        return cls(run.device, run.size(SIZE, QUICK_SIZE))

    def up(self) -> None:
        """Host to device."""
        driver.copy(self.near.data_ptr(), self.host.address, self.nbytes, self._current())

    def down(self) -> None:
        """Device to host, other memory than :meth:`up`."""
        source, target = self.near.data_ptr() + self.nbytes, self.host.address + self.nbytes
        driver.copy(target, source, self.nbytes, self._current())

    def both(self) -> None:
        """Both at once, on two streams; the current stream waits for them."""
        here = torch.cuda.current_stream(self.device)
        for stream, copy in zip(self.streams, (self.up, self.down), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                copy()
        for stream in self.streams:
            here.wait_stream(stream)

    def in_place(self, blocks: int) -> None:
        """Read and write all host memory over the link."""
        touch(self.host.address, 2 * self.nbytes, blocks, self.device)

    def cases(self, blocks: int) -> list[Case]:
        """All of :data:`MOVES`, the plain kernel on so many thread blocks."""
        cases = [Case(UP, self.up), Case(DOWN, self.down), Case(BOTH, self.both)]
        return [*cases, Case(IN_PLACE, functools.partial(self.in_place, blocks))]

    def best_blocks(self, run: Run) -> tuple[int, list[Row]]:
        """The fastest grid of the plain kernel, and a row of each with its times."""
        cases = [Case(str(blocks), functools.partial(self.in_place, blocks)) for blocks in BLOCKS]
        times = run.measure(cases, rounds=3, warmup=1)
        rows = [{"blocks": blocks, **times[str(blocks)]} for blocks in BLOCKS]
        return min(rows, key=lambda row: best(row)["median"])["blocks"], rows

    def _current(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)
