"""Many pieces of memory, copied in one launch over a list of their addresses; and ways to do it without."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedopt import Sweep, rule

#: A warp takes a piece, in loads of 16 bytes, four of them in flight, where addresses and size allow.
CUDA = r"""
struct Piece { const char* from; char* to; unsigned long long nbytes; };
extern "C" __global__ void __launch_bounds__(256) copy_list(const Piece* pieces, long long count) {
    const int lane = threadIdx.x % 32;
    const long long warps = gridDim.x * (long long)blockDim.x / 32;
    for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32; i < count; i += warps) {
        const Piece p = pieces[i];
        long long j = lane;
        if (((size_t)p.from | (size_t)p.to | p.nbytes) % 16) {
            for (; j < p.nbytes / 4; j += 32) ((unsigned*)p.to)[j] = ((const unsigned*)p.from)[j];
            continue;
        }
        const uint4* from = (const uint4*)p.from;
        uint4* to = (uint4*)p.to;
        const long long n = p.nbytes / 16;
        for (; j + 96 < n; j += 128) {
            const uint4 a = from[j], b = from[j + 32], c = from[j + 64], d = from[j + 96];
            to[j] = a, to[j + 32] = b, to[j + 64] = c, to[j + 96] = d;
        }
        for (; j < n; j += 32) to[j] = from[j];
    }
}
"""
#: Bytes of a piece at most; larger ones are cut.  Blocks of a launch at most.
CUT, BLOCKS = 16 << 10, 132 * 8
Tensors = Sequence[torch.Tensor]
Call = Callable[[], object]


def pieces(sources: Tensors, targets: Tensors) -> npt.NDArray[np.int64]:
    """(from, to, bytes) of each piece; sizes are multiples of 4 bytes."""
    rows = []
    for source, target in zip(sources, targets, strict=True):
        at = np.arange(0, source.nbytes, CUT)
        rows.append(np.stack([source.data_ptr() + at, target.data_ptr() + at, np.minimum(CUT, source.nbytes - at)], 1))
    return np.concatenate(rows)


@functools.cache
def on_cpu() -> Callable[[npt.NDArray[np.int64]], None]:
    """The kernel for Numba."""
    import numba

    from pagedopt import kernels

    pointer: Any = kernels.pointer

    @numba.njit
    def copy_list(rows):
        for row in rows:
            source = numba.carray(pointer(row[0]), row[2], np.uint8)
            target = numba.carray(pointer(row[1]), row[2], np.uint8)
            for i in range(row[2]):
                target[i] = source[i]

    return copy_list


def over_a_list(sources: Tensors, targets: Tensors, device: torch.device | None = None) -> Call:
    """One launch on a device, by default that of the first source, whatever device a piece is on."""
    rows, device = pieces(sources, targets), device or sources[0].device
    if device.type == "cpu":
        return functools.partial(on_cpu(), rows)
    import cupy

    from pagedopt.kernels.cuda import Stream

    with torch.cuda.device(device):
        table, kernel = torch.from_numpy(rows).to(device), cupy.RawKernel(CUDA, "copy_list")
        kernel.compile()
    blocks = min(BLOCKS, -(-len(rows) // 8))

    def run() -> None:
        with torch.cuda.device(device):
            stream = Stream(torch.cuda.current_stream().cuda_stream)
            kernel((blocks,), (256,), (table.data_ptr(), np.int64(len(rows))), stream=stream)

    return run


@rule
def same(x):
    return x


def ours(sources: Tensors, targets: Tensors) -> Call:
    """A rule that changes nothing, from one list into another."""
    sweep = Sweep(same.out_of_place, [list(sources), list(targets)])
    return functools.partial(sweep.run, {})


def one_by_one(sources: Tensors, targets: Tensors) -> Call:
    """A call of the driver, or of the C library, for each piece."""
    whole = [
        (target.data_ptr(), source.data_ptr(), source.nbytes) for source, target in zip(sources, targets, strict=True)
    ]
    if sources[0].device.type == "cpu":
        return lambda: [ctypes.memmove(*piece) for piece in whole]
    from pagedopt.system.driver import copy

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for piece in whole:
            copy(*piece, stream)

    return run


def batch(sources: Tensors, targets: Tensors) -> Call:
    """One call of the driver for all pieces (CUDA 12.8 and later); it refuses the default stream."""
    from pagedopt.system.driver import bindings, call

    d = bindings()
    attributes = d.CUmemcpyAttributes()
    attributes.srcAccessOrder = d.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    into, out_of = ([d.CUdeviceptr(t.data_ptr()) for t in tensors] for tensors in (targets, sources))
    sizes, side = [t.nbytes for t in sources], torch.cuda.Stream()

    def run() -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        call("cuMemcpyBatchAsync", into, out_of, sizes, len(sizes), [attributes], [0], 1, side.cuda_stream)
        here.wait_stream(side)

    return run


def in_torch(sources: Tensors, targets: Tensors) -> Call:
    """``copy_`` of each."""
    return lambda: [target.copy_(source) for source, target in zip(sources, targets, strict=True)]


def foreach(sources: Tensors, targets: Tensors) -> Call:
    """All of them in one call of torch."""
    return functools.partial(torch._foreach_copy_, list(targets), list(sources))
