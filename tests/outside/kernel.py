"""A kernel of one's own, for the card with CuPy and for the CPU with Numba: ``targets[i] = by * sources[i]``."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from pagedopt import DeviceTable
from pagedopt.kernels import pointer

CUDA = r"""
extern "C" __global__ void scale_into(const long long* rows, long long tensors, float by) {
    for (long long i = blockIdx.x; i < tensors; i += gridDim.x) {
        const long long* row = rows + 4 * i;  // two lists: two addresses, elements, 0
        const float* source = (const float*)row[0];
        float* target = (float*)row[1];
        for (long long j = threadIdx.x; j < row[2]; j += blockDim.x) target[j] = by * source[j];
    }
}
"""
THREADS, BLOCKS = 256, 1024


@functools.cache
def on_the_card() -> Any:
    import cupy

    return cupy.RawKernel(CUDA, "scale_into")


def launch(table: DeviceTable, by: float) -> None:
    """Queue it on torch's current stream.  CUDA takes no grid without blocks, so there is none for an empty table."""
    if not len(table):
        return
    import cupy

    with torch.cuda.device(table.device), table.rows_on_device() as rows:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            arguments = (np.uint64(rows), np.int64(len(table)), np.float32(by))
            on_the_card()((min(len(table), BLOCKS),), (THREADS,), arguments)


@numba.njit
def walk(rows, by):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        numel = rows[i, 2]
        source = numba.carray(pointer(rows[i, 0]), numel, np.float32)
        target = numba.carray(pointer(rows[i, 1]), numel, np.float32)
        for j in range(numel):
            target[j] = by * source[j]


def scale_into(sources: list[torch.Tensor], targets: list[torch.Tensor], by: float) -> None:
    """Scale on the tensors' device.  If every step does this, make the table once and reuse it."""
    table = DeviceTable([sources, targets], writes=[1])
    if table.device.type == "cuda":
        launch(table, by)
    else:
        walk(table.rows, np.float32(by))
    for target in targets:
        torch.autograd.graph.increment_version(target)
