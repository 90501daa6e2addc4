"""LayerNorm and tanh of many separate tensors in one launch, into one: a pointer list where others need a stack.

What an optimizer does over a list of parameters, done over a list of activations: a kernel of one's own reads the
addresses from a :class:`~pagedopt.DeviceTable`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagedopt import DeviceTable
from pagedopt.kernels.cuda import Stream

#: A warp keeps a row in registers: it is read once and written once.  Rows of the table: address, elements, 0.
CUDA = r"""
#define FULL 0xffffffffu
#define PER (DIM / 128)

static __device__ float over_the_warp(float x) {
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(FULL, x, i);
    return x;
}

extern "C" __global__ void __launch_bounds__(256)
norm_tanh(const unsigned long long* rows, float* out, long long batch) {
    const unsigned long long* row = rows + 3 * blockIdx.y;
    const float4* from = (const float4*)row[0];
    float4* to = (float4*)(out + blockIdx.y * batch * DIM);
    const int lane = threadIdx.x % 32;
    for (long long i = blockIdx.x * 8 + threadIdx.x / 32; i < batch; i += gridDim.x * 8) {
        float4 x[PER];
        float sum = 0, squares = 0;
        for (int j = 0; j < PER; ++j) {
            x[j] = from[i * (DIM / 4) + j * 32 + lane];
            sum += x[j].x + x[j].y + x[j].z + x[j].w;
        }
        const float mean = over_the_warp(sum) / DIM;
        for (int j = 0; j < PER; ++j) {
            x[j].x -= mean, x[j].y -= mean, x[j].z -= mean, x[j].w -= mean;
            squares += x[j].x * x[j].x + x[j].y * x[j].y + x[j].z * x[j].z + x[j].w * x[j].w;
        }
        const float scale = rsqrtf(over_the_warp(squares) / DIM);
        for (int j = 0; j < PER; ++j) {
            x[j].x = tanhf(x[j].x * scale), x[j].y = tanhf(x[j].y * scale);
            x[j].z = tanhf(x[j].z * scale), x[j].w = tanhf(x[j].w * scale);
            to[i * (DIM / 4) + j * 32 + lane] = x[j];
        }
    }
}
"""


class NormTanh:
    """One launch over separate tensors of one shape.

    Args:
        tensors: (batch, dim) each, float32, on a GPU; ``dim`` is a multiple of 128.
        held: whether the table is lent once, for as long as this object lives, to tensors that stay where they are;
            else it looks in every call where they lie.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], held: bool = False) -> None:
        import cupy

        self.table = DeviceTable([tensors])
        self.batch, self.dim = tensors[0].shape
        if self.dim % 128 or tensors[0].dtype != torch.float32:
            raise ValueError(f"rows of {self.dim} {tensors[0].dtype}; needs a multiple of 128, float32")
        self._kernel: Any = cupy.RawKernel(CUDA, "norm_tanh", options=(f"-DDIM={self.dim}",))
        self._kernel.compile()  # a module cannot be loaded while a graph is captured
        self._lend: Callable[[], contextlib.AbstractContextManager[int]] = self.table.rows_on_device
        if held:
            lease = contextlib.ExitStack()
            rows = lease.enter_context(self._lend())
            self._lend = lambda: contextlib.nullcontext(rows)
            weakref.finalize(self, lease.close).atexit = False

    def __call__(self) -> torch.Tensor:
        """(tensors, batch, dim), newly allocated."""
        device, count = self.table.device, len(self.table)
        out = torch.empty(count, self.batch, self.dim, device=device)
        stream = Stream(torch._C._cuda_getCurrentRawStream(device.index))
        with self._lend() as rows:  # a block: eight warps, four rows each
            self._kernel((-(-self.batch // 32), count), (256,), (rows, out.data_ptr(), self.batch), stream=stream)
        return out
