"""Many pieces of memory, copied in one launch over a list of their addresses; and ways to do it without."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

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


def over_a_list(sources: Tensors, targets: Tensors, device: torch.device | None = None) -> Call:
    """One launch on a device, by default that of the first source, whatever device a piece is on."""
    rows, device = pieces(sources, targets), device or sources[0].device
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


def in_torch(sources: Tensors, targets: Tensors) -> Call:
    """``copy_`` of each."""
    return lambda: [target.copy_(source) for source, target in zip(sources, targets, strict=True)]


def checked(call: Call, sources: Tensors, targets: Tensors) -> Call:
    """A way that has copied everything once; what lies on two devices is compared on the host.

    Raises:
        AssertionError: it has not.
    """
    for target in targets:
        target.fill_(-1.0)
    waited(targets)
    call()
    waited((*sources, *targets))
    apart = len({t.device for t in (*sources, *targets)}) > 1
    found = [torch.cat([t.cpu() if apart else t for t in tensors]) for tensors in (sources, targets)]
    assert torch.equal(*found), "wrong"
    return call


def waited(tensors: Tensors) -> None:
    """Until every GPU that one lies on is idle."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)
