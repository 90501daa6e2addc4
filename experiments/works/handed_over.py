"""Lists of pointers handed to kernels of a few lines, as nobody's transport does it, and whether they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BY_VALUE = """\
template <int N> struct List { float* item[N]; };
template <int N> __global__ void sum(const __grid_constant__ List<N> list, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) atomicAdd(out, *list.item[i]);
}
template <int N> struct Arguments { float* item[N]; float* out; };
template <int N> __global__ void sum_all(const __grid_constant__ Arguments<N> a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) atomicAdd(a.out, *a.item[i]);
}
template <int N> __global__ void alone(const __grid_constant__ List<N> list) {
    if (threadIdx.x < N) *list.item[threadIdx.x] = 1.0f;
}
"""
THREE_LISTS = """\
template <int N> struct Three { float* addresses[3][N]; };
template <int N> __global__ void add(const __grid_constant__ Three<N> lists) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) *lists.addresses[2][i] = *lists.addresses[0][i] + *lists.addresses[1][i];
}
"""
#: Counts pointers that are what they ought to be, and follows none.
ARRIVED = """\
template <int N> struct Cut { int* count; unsigned long long first; unsigned long long item[N]; };
template <int N> __global__ void arrived(const __grid_constant__ Cut<N> a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N && a.item[i] == a.first + 4ull * i) atomicAdd(a.count, 1);
}
"""
HOST_LIST = """\
struct Arguments { float** list; long long count; float* out; };
__global__ void sum_list(const __grid_constant__ Arguments a) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) atomicAdd(a.out, *a.list[i]);
}
"""


class LeftOut(Exception):
    """What is tried needs something that is not here."""


def gpu() -> Any:
    """torch, where it has a GPU.

    Raises:
        LeftOut: it has none.
    """
    import torch

    if not torch.cuda.is_available():
        raise LeftOut("needs a GPU")
    return torch


def some_values(torch: Any, count: int) -> tuple[Any, list[int]]:
    """Random whole numbers on the GPU, whose float sum is exact in any order, and the address of each."""
    values = torch.randint(1, 100, (count,), device="cuda").float()
    return values, [values.data_ptr() + 4 * i for i in range(count)]


def right_sum(out: Any, values: Any) -> str:
    """That ``out`` is the sum of ``values``, in a word.

    Raises:
        AssertionError: it is not.
    """
    if out.item() != values.sum().item():
        raise AssertionError(f"wrong: {out.item()} instead of {values.sum().item()}")
    return "right"


def launch(text: str, name: str, argument: Any, count: int) -> None:
    """Launch a kernel with as many threads as ``count``, or more, on the current stream."""
    import torch

    from pagedopt.kernels.cuda import CudaKernel, Stream
    from pagedopt.tables.layout import BLOCK
    from pagedopt.transports.transport import opaque

    device = torch.cuda.current_device()
    stream = Stream(torch.cuda.current_stream().cuda_stream)
    CudaKernel(text, name, device, chunks_per_block=BLOCK)(opaque(argument), count, stream)


def launcher(text: str, name: str, argument: Any, count: int) -> Callable[[int], None]:
    """A launch of ``count`` threads or more that hands over so many bytes of an argument, past every check of ours."""
    import ctypes

    import torch

    from pagedopt.kernels.nvrtc import compile_cuda
    from pagedopt.system.cuda.driver import bindings, check

    major, minor = torch.cuda.get_device_capability()
    cubin, (symbol,) = compile_cuda(text, (name,), f"sm_{major}{minor}")
    d = bindings()
    module = check("cuModuleLoadData", d.cuModuleLoadData(cubin))
    kernel = check("cuModuleGetFunction", d.cuModuleGetFunction(module, symbol.encode()))

    def hand_over(nbytes: int) -> None:
        size = ctypes.c_size_t(nbytes)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, …_BUFFER_SIZE, …_END
        extra = (ctypes.c_void_p * 5)(1, argument.ctypes.data, 2, ctypes.addressof(size), None)
        blocks = -(-count // 256)
        stream = torch.cuda.current_stream().cuda_stream
        launched = d.cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, 0, ctypes.addressof(extra))
        check("cuLaunchKernel", launched)

    return hand_over
