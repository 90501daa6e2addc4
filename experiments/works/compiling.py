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
from experiments.works.wheels import ANY_PYTHON, ANY_TORCH, FULL, LATE, built_wheel

Params = list[torch.nn.Parameter]
Step = Callable[[], object]
OURS, AHEAD, STABLE = "PagedAdamW", "C++ extension, built ahead", "C++ extension, stable ABI, built ahead"

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
#: The kernel as an operator of torch, whose headers change with torch; those of the stable ABI do not.
OPERATOR = f"""
#include <cmath>
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
#define SCHEMA "step(int rows, int count, int stream, float a, float b, float c, float d, float e, float f) -> ()"
"""
EXTENSION = f"#include <torch/library.h>{OPERATOR}TORCH_LIBRARY_FRAGMENT(late, m) {{ m.def(SCHEMA, &step); }}"
STABLE_EXTENSION = f"""#include <torch/csrc/stable/library.h>{OPERATOR}
STABLE_TORCH_LIBRARY_FRAGMENT(late, m) {{ m.def(SCHEMA); }}
STABLE_TORCH_LIBRARY_IMPL(late, CompositeExplicitAutograd, m) {{ m.impl("step", TORCH_BOX(&step)); }}"""
SETUP = """
from setuptools import setup
from torch.utils import cpp_extension as cpp
setup(
    name="late", version="1.0", cmdclass={{"build_ext": cpp.BuildExtension}}, options={options},
    ext_modules=[cpp.{kind}("late", [{file!r}], py_limited_api={limited}, extra_compile_args={arguments})],
)
"""
#: For torch 2.10 and later, and for any Python from 3.11 on.
STABLE_SETUP = {
    "limited": True,
    "arguments": ["-DTORCH_TARGET_VERSION=0x020a000000000000"],
    "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
}


@dataclass(frozen=True)
class Way:
    """A way to compile the update.

    Attributes:
        start: of parameters with gradients, and the folder with what was built ahead; returns a step.
        ships: what its author ships (:data:`experiments.works.wheels.KINDS`).
        build: of a device, how many tensors there are and a folder: builds ahead; returns the tag of the wheel, if any.
        slow: whether a cold start takes many seconds: toys do without it.
        repeats: how often it is started, with cold and with warm caches.
    """

    start: Callable[[Params, Path], Step]
    ships: str = LATE
    build: Callable[[torch.device, int, Path], str] | None = None
    devices: Sequence[str] = ("cuda",)
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


def by_torch(params: Params, update: Callable[..., object]) -> Step:
    """A step by a compiled :class:`Update`."""
    kept, steps = lists(params), itertools.count(1)
    return lambda: update(kept, *(torch.tensor(x, device=params[0].device) for x in scalars(next(steps))[3:5]))


class Update(torch.nn.Module):
    """The update in torch's own operators, for its compilers; every tensor is an argument."""

    def forward(self, lists: list[list[torch.Tensor]], rate: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        params, grads, first, second = lists
        shrink, beta1, beta2, _, _, eps = scalars(1)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        below = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(second), root), eps)
        torch._foreach_mul_(params, shrink)
        torch._foreach_sub_(params, torch._foreach_mul(torch._foreach_div(first, below), rate))
        return rate + 0  # what is exported has to return something


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


def wheel(device: torch.device, text: str, folder: Path, stable: bool = False) -> str:
    """Build a wheel as a project with ``setup.py`` does, by pip and setuptools, and unpack it."""
    kind, file = ("CUDAExtension", "late.cu") if device.type == "cuda" else ("CppExtension", "late.cpp")
    how = STABLE_SETUP if stable else {"limited": False, "arguments": [], "options": {}}
    (folder / file).write_text(text)
    (folder / "setup.py").write_text(SETUP.format(kind=kind, file=file, **how))
    made = built_wheel(folder, folder)
    zipfile.ZipFile(made).extractall(folder / "site")
    return made.stem.partition("-1.0-")[2]


def export(device: torch.device, count: int, folder: Path) -> str:
    """For lists of these shapes."""
    rate, root = (torch.tensor(value, device=device) for value in scalars(1)[3:5])
    exported = torch.export.export(Update(), (lists(work(count).parameters(device)), rate, root))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "late.pt2"))
    return ""


def exported(params: Params, folder: Path) -> Step:
    return by_torch(params, torch._inductor.aoti_load_package(str(folder / "late.pt2")))


BOTH = ("cuda", "cpu")
WAYS = {
    OURS: Way(ours, devices=BOTH, repeats=3),
    "CuPy RawKernel": Way(cupy_kernel),
    "torch.cuda._compile_kernel": Way(torch_kernel),
    "Triton": Way(triton_kernel),
    "torch.compile": Way(lambda params, _: by_torch(params, torch.compile(Update())), devices=BOTH, slow=True),
    "load_inline": Way(inline, devices=BOTH, slow=True),
    AHEAD: Way(unpacked, FULL, lambda device, _, at: wheel(device, EXTENSION, at), BOTH, True),
    STABLE: Way(unpacked, ANY_TORCH, lambda device, _, at: wheel(device, STABLE_EXTENSION, at, True), BOTH, True),
    "AOTInductor": Way(exported, ANY_PYTHON, export, BOTH, True),
}
