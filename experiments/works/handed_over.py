"""Lists of pointers handed to kernels of a few lines, as nobody's transport does it, and whether they arrive."""

from __future__ import annotations

import bisect
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ARCH = "sm_90"
BY_VALUE = """\
template <int N> struct List { float* item[N]; };
template <int N> __global__ void alone(const __grid_constant__ List<N> list) { *list.item[0] = 1.0f; }
template <int N> __global__ void beside(const __grid_constant__ List<N> list, float* out) { *out = *list.item[0]; }
template <int N> struct Arguments { float* item[N]; float* out; };
template <int N> __global__ void sum_all(const __grid_constant__ Arguments<N> a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) atomicAdd(a.out, *a.item[i]);
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
template <int N> struct Cut { float* count; unsigned long long first; unsigned long long item[N]; };
template <int N> __global__ void arrived(const __grid_constant__ Cut<N> a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N && a.item[i] == a.first + 4ull * i) atomicAdd(a.count, 1.0f);
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


def by_tool(tool: str, name: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Compile a text, in a file of this name, with a program of the toolkit."""
    compiler = shutil.which(tool)
    if compiler is None:
        raise LeftOut(f"{tool} is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text)
        command = [compiler, *options, "-o", "compiled", name]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def by_nvrtc(text: str, name: str) -> str:
    """Compile a kernel of a text with NVRTC."""
    from pagedopt.kernels.nvrtc import CompileError, compile_cuda

    try:
        compile_cuda(text, (name,), ARCH)
    except CompileError:
        raise
    except (ImportError, RuntimeError) as error:  # cuda-bindings raises the second where the library is missing
        raise LeftOut(f"NVRTC is not installed ({error}); pip install nvidia-cuda-nvrtc") from error
    return "compiled"


def most_by_nvrtc(text: str, kernel: str) -> int:
    """The largest argument with which NVRTC takes a template."""
    from pagedopt.kernels.nvrtc import CompileError

    def fits(count: int) -> bool:
        try:
            return bool(by_nvrtc(text, f"{kernel}<{count}>"))
        except CompileError:
            return False

    return largest(fits)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number below 65,536 that fits, where 1 does, and none beyond one that does not."""
    return bisect.bisect_left(range(1, 1 << 16), True, key=lambda count: not fits(count))


def some_values(count: int) -> tuple[Any, list[int]]:
    """Random whole numbers on the GPU, whose float sum is exact in any order, and the address of each.

    Raises:
        LeftOut: there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise LeftOut("needs a GPU")
    values = torch.randint(1, 100, (count,), device="cuda").float()
    return values, [values.data_ptr() + 4 * i for i in range(count)]


def right_sum(values: Any, text: str, name: str, *words: int) -> str:
    """Launch a kernel over ``words`` and the address of its result, and say in a word that this is their sum.

    Raises:
        AssertionError: it is not.
    """
    out = values.new_zeros(1)
    launch(text, name, [*words, out.data_ptr()], len(values))
    if out.item() != values.sum().item():
        raise AssertionError(f"wrong: {out.item()} instead of {values.sum().item()}")
    return "right"


def launch(text: str, name: str, words: Sequence[int], count: int, nbytes: int | None = None) -> None:
    """Launch ``count`` threads or more and hand over so many bytes of a struct of words, past every check of ours."""
    import ctypes

    import numpy as np
    import torch

    from pagedopt.kernels.nvrtc import compile_cuda
    from pagedopt.system.cuda.driver import bindings, check

    major, minor = torch.cuda.get_device_capability()
    cubin, (symbol,) = compile_cuda(text, (name,), f"sm_{major}{minor}")
    d = bindings()
    module = check("cuModuleLoadData", d.cuModuleLoadData(cubin))
    kernel = check("cuModuleGetFunction", d.cuModuleGetFunction(module, symbol.encode()))
    argument = np.array(words, np.uint64)
    size = ctypes.c_size_t(argument.nbytes if nbytes is None else nbytes)
    # CU_LAUNCH_PARAM_BUFFER_POINTER, …_BUFFER_SIZE, …_END
    extra = (ctypes.c_void_p * 5)(1, argument.ctypes.data, 2, ctypes.addressof(size), None)
    stream = torch.cuda.current_stream().cuda_stream
    blocks = -(-count // 256)
    launched = d.cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, 0, ctypes.addressof(extra))
    check("cuLaunchKernel", launched)
