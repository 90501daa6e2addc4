"""AdamW over one list of tensors in every way to compile it: late, in the process that steps, or early, before it.

A way imports what it needs when it starts: nothing of pagedopt, of a compiler or of another package is loaded before.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.works.models import HYPER, Work
from experiments.works.wheels import built_wheel

Params = list[torch.nn.Parameter]
Step = Callable[[], object]
OURS, ON_CPU, AHEAD = "PagedAdamW", "PagedAdamW on a CPU", "C++ extension, built ahead"

#: A row of the list is four addresses, and how many elements lie there; on a GPU a column of blocks does a row.
KERNEL = r"""
#define SCALARS double shrink, double beta1, double beta2, double rate, double root, double eps
#define GIVEN shrink, beta1, beta2, rate, root, eps
#ifndef __CUDACC__
#define __device__
#endif
static __device__ void update(const long long* row, long long i, SCALARS) {
    float *param = (float*)row[0], *first = (float*)row[2], *second = (float*)row[3];
    const float grad = ((const float*)row[1])[i];
    const float m = first[i] += (float)(1 - beta1) * (grad - first[i]);
    const float v = second[i] = (float)beta2 * second[i] + (float)(1 - beta2) * grad * grad;
    param[i] = (float)shrink * param[i] - (float)rate * m / (sqrtf(v) / (float)root + (float)eps);
}
#ifdef __CUDACC__
extern "C" __global__ void adamw(const long long* rows, SCALARS) {
    const long long *row = rows + 5 * blockIdx.y, stride = gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < row[4]; i += stride) update(row, i, GIVEN);
}
#endif
"""
BLOCKS, THREADS = 8, 256
#: The kernel as an operator of torch.
EXTENSION = f"""
#include <cmath>
#include <torch/library.h>
{KERNEL}
static void step(int64_t rows, int64_t count, int64_t stream, SCALARS) {{
    const long long* row = (const long long*)rows;
#ifdef __CUDACC__
    adamw<<<dim3({BLOCKS}, count), {THREADS}, 0, (cudaStream_t)stream>>>(row, GIVEN);
#else
    for (; count--; row += 5)
        for (long long i = 0; i < row[4]; ++i) update(row, i, GIVEN);
#endif
}}
TORCH_LIBRARY_FRAGMENT(late, m) {{
    m.def("step(int rows, int count, int stream, float a, float b, float c, float d, float e, float f) -> ()", &step);
}}
"""
SETUP = """
from setuptools import setup
from torch.utils import cpp_extension as cpp
extensions = [cpp.{kind}("late", [{file!r}])]
setup(name="late", version="1.0", ext_modules=extensions, cmdclass={{"build_ext": cpp.BuildExtension}})
"""


@dataclass(frozen=True)
class Way:
    """A way to compile the update.

    Attributes:
        start: of parameters with gradients, and the folder with what was built ahead; returns a step.
        devices: of machines on which it is measured.
        on_cpu: whether it steps on the CPU there, too.
        build: of a device and a folder: builds ahead; returns the tag of the wheel.
        slow: whether a cold start takes many seconds: toys do without it.
        repeats: how often it is started, with cold and with warm caches.
    """

    start: Callable[[Params, Path], Step]
    devices: Sequence[str] = ("cuda",)
    on_cpu: bool = False
    build: Callable[[torch.device, Path], str] | None = None
    slow: bool = False
    repeats: int = 1


def work(count: int) -> Work:
    """So many tensors, too small for their bytes to count."""
    return Work(f"{count} x 64²", [(64, 64)] * count)


def scalars(step: int) -> tuple[float, ...]:
    """What depends on hyperparameters alone, in the order of ``SCALARS``."""
    lr, (beta1, beta2) = HYPER["lr"], HYPER["betas"]
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return 1 - lr * HYPER["weight_decay"], beta1, beta2, rate, root, HYPER["eps"]


def lists(params: Params) -> list[list[torch.Tensor]]:
    """Values, gradients, and two lists of moments."""
    values, grads = [p.detach() for p in params], [p.grad for p in params if p.grad is not None]
    return [values, grads, *([torch.zeros_like(value) for value in values] for _ in range(2))]


def by_addresses(params: Params, launch: Callable[..., object]) -> Step:
    """A step by the kernel: ``launch`` is given the rows, torch's stream and the scalars."""
    kept, steps = lists(params), itertools.count(1)
    rows = torch.tensor([[*(t.data_ptr() for t in row), row[0].numel()] for row in zip(*kept, strict=True)])
    rows = rows.to(params[0].device)
    stream = torch.cuda.current_stream().cuda_stream if rows.is_cuda else 0
    return lambda _kept=kept: launch(rows, stream, *scalars(next(steps)))  # type: ignore[misc]  # rows keep nothing


def by_operator(params: Params) -> Step:
    """A step by the operator that an extension has registered."""
    step = torch.ops.late.step
    return by_addresses(params, lambda rows, stream, *given: step(rows.data_ptr(), len(rows), stream, *given))


def update(lists: list[list[torch.Tensor]], rate: torch.Tensor, root: torch.Tensor) -> None:
    """The update in torch's own operators, for its compiler; every tensor is an argument."""
    params, grads, first, second = lists
    shrink, beta1, beta2, _, _, eps = scalars(1)
    torch._foreach_lerp_(first, grads, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    below = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(second), root), eps)
    torch._foreach_mul_(params, shrink)
    torch._foreach_sub_(params, torch._foreach_mul(torch._foreach_div(first, below), rate))


def by_torch(params: Params, _: Path) -> Step:
    compiled, kept, steps = torch.compile(update), lists(params), itertools.count(1)
    return lambda: compiled(kept, *(torch.tensor(x, device=params[0].device) for x in scalars(next(steps))[3:5]))


def ours(params: Params, _: Path) -> Step:
    from pagedopt import PagedAdamW

    return PagedAdamW(params, **HYPER).step


def cupy_kernel(params: Params, _: Path) -> Step:
    import cupy

    kernel = cupy.RawKernel(KERNEL, "adamw")

    def launch(rows: torch.Tensor, stream: int, *given: float) -> None:
        with cupy.cuda.ExternalStream(stream):
            kernel((BLOCKS, len(rows)), (THREADS,), (rows.data_ptr(), *given))

    return by_addresses(params, launch)


def torch_kernel(params: Params, _: Path) -> Step:
    kernel: Any = torch.cuda._compile_kernel(KERNEL, "adamw")  # type: ignore[attr-defined,unused-ignore]
    return by_addresses(params, lambda rows, _, *given: kernel((BLOCKS, len(rows), 1), (THREADS, 1, 1), [rows, *given]))


def triton_kernel(params: Params, _: Path) -> Step:
    from experiments.works.triton_table import TableAdamW  # over our table: it imports pagedopt

    return TableAdamW(params, **HYPER).step


def inline(params: Params, _: Path) -> Step:
    from torch.utils.cpp_extension import load_inline

    cpp, cuda = ("", [EXTENSION]) if params[0].is_cuda else (EXTENSION, None)
    load_inline("late", cpp, cuda, is_python_module=False, no_implicit_headers=True)
    return by_operator(params)


def unpacked(params: Params, folder: Path) -> Step:
    torch.ops.load_library(next((folder / "site").glob("*.so")))
    return by_operator(params)


def wheel(device: torch.device, folder: Path) -> str:
    """Build a wheel as a project with ``setup.py`` does, by pip and setuptools, and unpack it."""
    kind, file = ("CUDAExtension", "late.cu") if device.type == "cuda" else ("CppExtension", "late.cpp")
    (folder / file).write_text(EXTENSION)
    (folder / "setup.py").write_text(SETUP.format(kind=kind, file=file))
    made = built_wheel(folder, folder)
    zipfile.ZipFile(made).extractall(folder / "site")
    return made.stem.partition("-1.0-")[2]


BOTH = ("cuda", "cpu")
WAYS = {
    OURS: Way(ours, repeats=3),
    ON_CPU: Way(ours, BOTH, on_cpu=True),
    "CuPy RawKernel": Way(cupy_kernel, repeats=3),
    "torch.cuda._compile_kernel": Way(torch_kernel, repeats=3),
    "Triton": Way(triton_kernel),
    "torch.compile": Way(by_torch, BOTH, slow=True),
    "load_inline": Way(inline, BOTH, slow=True),
    AHEAD: Way(unpacked, BOTH, build=wheel, slow=True),
}
