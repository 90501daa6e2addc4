"""A plain kernel that works in place, on memory of the host over the link.  What a step in place is held to."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from experiments.clock import Case
from experiments.comparing import best
from experiments.lab import Row, Run
from experiments.works.link import BOTH, DOWN, IN_PLACE, UP, Link
from pagedopt.kernels import cuda

#: Thread blocks of the plain kernel: its best is what an update in place is held to.
BLOCKS = (8, 16, 32, 66, 132, 528)
THREADS = 512
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


class InPlace(Link):
    """A link whose host memory is read and written in place, too: twice the bytes of a copy."""

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
