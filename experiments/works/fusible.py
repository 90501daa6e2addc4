"""What can be fused vertically, in ways that fuse it and in ways that do not, each with the bytes that it must move.

A square of each element; its square again; LayerNorm and tanh over rows; a step of AdamW.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from experiments.works import contenders
from experiments.works.contenders import COMPILED, COPY, FOREACH, FUSED, LOOP, OURS
from experiments.works.models import Work
from experiments.works.norm_tanh import NormTanh
from pagedopt import multi_tensor_apply, rule

ONCE, TWICE, NORM, ADAMW = "square", "square of square", "LayerNorm and tanh", "AdamW"
EAGER, BY_COMPILER, LIST = "eager", "torch.compile", "one kernel over a pointer list (ours)"
RULE, RULES = "one rule (ours)", "two rules (ours)"
DIM = 256
Call = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """How something is done.

    Attributes:
        due: bytes of each element that it must move.
        compiled: whether Inductor makes it.
        seen: whether torch dispatches its operators, or else it is a kernel that reads and writes each operand once.
        counters: whether the GPU's counters can tell: they count kernels, no copies, one by one behind empty caches.
    """

    make: Callable[[], Call]
    due: int
    compiled: bool = False
    seen: bool = True
    counters: bool = True


Ways = dict[str, Way]
CUDA = r"""
extern "C" __global__ void squared(const float4* x, float4* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = x[i];
    for (int k = 0; k < TIMES; ++k) v.x *= v.x, v.y *= v.y, v.z *= v.z, v.w *= v.w;
    out[i] = v;
}
"""


@rule
def square(x):
    return x * x


@rule
def square_of_square(x):
    y = x * x
    return y * y


def once(x: torch.Tensor) -> torch.Tensor:
    """As one writes it."""
    return x * x


def again(x: torch.Tensor) -> torch.Tensor:
    """As one writes it, twice."""
    y = x * x
    return y * y


def ruled(x: torch.Tensor, out: torch.Tensor, *rules: Any) -> Call:
    """A launch of ours for each rule, with what lies between two of them in memory."""
    between = [torch.empty_like(x) for _ in rules[1:]]

    def run() -> torch.Tensor:
        for each, source, target in zip(rules, [x, *between], [*between, out], strict=True):
            multi_tensor_apply(each, [[source]], out=[[target]])
        return out

    return run


def jiterator(x: torch.Tensor, twice: bool) -> Call:
    """In torch's compiler of functions on scalars."""
    body = "T y = x * x; return y * y;" if twice else "return x * x;"
    function: Any = torch.cuda.jiterator._create_jit_fn(f"template <typename T> T squared(T x) {{ {body} }}")
    return partial(function, x)


def cupy_elementwise(x: torch.Tensor, out: torch.Tensor, twice: bool) -> Call:
    """In CuPy's; torch's default stream is CuPy's, too."""
    cupy = importlib.import_module("cupy")
    body = "float z = x * x; y = z * z" if twice else "y = x * x"
    kernel = cupy.ElementwiseKernel("float32 x", "float32 y", body, "squared_twice" if twice else "squared")
    source, target = cupy.asarray(x), cupy.asarray(out)

    def run() -> torch.Tensor:
        kernel(source, target)
        return out

    return run


def triton(x: torch.Tensor, out: torch.Tensor, twice: bool) -> Call:
    """In Triton."""
    return partial(importlib.import_module("experiments.works.triton_square").squared, x, out, twice)


def nvrtc(x: torch.Tensor, out: torch.Tensor, twice: bool) -> Call:
    """In torch's private wrapper of NVRTC."""
    if (compile_kernel := getattr(torch.cuda, "_compile_kernel", None)) is None:
        raise NotImplementedError(f"torch {torch.__version__} has no torch.cuda._compile_kernel")
    kernel, vectors = compile_kernel(CUDA.replace("TIMES", "2" if twice else "1"), "squared"), x.numel() // 4

    def run() -> torch.Tensor:
        kernel(grid=(-(-vectors // 256), 1, 1), block=(256, 1, 1), args=[x, out, vectors])
        return out

    return run


def squares(device: torch.device, quick: bool, twice: bool) -> tuple[int, Ways]:
    """Over a GiB of float32; on a CPU a quarter of that."""
    x = torch.rand(1 << (14 if quick else 28 if device.type == "cuda" else 26), device=device)
    out, function = torch.empty_like(x), again if twice else once
    ways = {
        COPY: Way(lambda: partial(out.copy_, x), 8, counters=False),
        EAGER: Way(lambda: partial(function, x), 16 if twice else 8),
        BY_COMPILER: Way(lambda: partial(torch.compile(function, dynamic=False), x), 8, compiled=True),
        RULE: Way(lambda: ruled(x, out, square_of_square if twice else square), 8, seen=False),
    }
    if twice:
        ways[RULES] = Way(lambda: ruled(x, out, square, square), 16, seen=False)
    if device.type == "cuda":
        ways |= {
            "jiterator": Way(lambda: jiterator(x, twice), 8, seen=False),
            "CuPy ElementwiseKernel": Way(lambda: cupy_elementwise(x, out, twice), 8, seen=False),
            "Triton": Way(lambda: triton(x, out, twice), 8, seen=False),
            "torch.cuda._compile_kernel": Way(lambda: nvrtc(x, out, twice), 8, seen=False),
        }
    return x.numel(), ways


def norm_tanh(x: torch.Tensor) -> torch.Tensor:
    """As one writes it."""
    return torch.tanh(torch.nn.functional.layer_norm(x, (DIM,), eps=0))


def norms(device: torch.device, quick: bool) -> tuple[int, Ways]:
    """Over rows of 256."""
    x = torch.rand(16 if quick else 1 << (20 if device.type == "cuda" else 16), DIM, device=device)
    return x.numel(), {
        COPY: Way(lambda: partial(torch.empty_like(x).copy_, x), 8, counters=False),
        EAGER: Way(lambda: partial(norm_tanh, x), 16),
        BY_COMPILER: Way(lambda: partial(torch.compile(norm_tanh, dynamic=False), x), 8, compiled=True),
        LIST: Way(lambda: NormTanh([x]), 8, seen=False),
    }


def steps(device: torch.device, quick: bool) -> tuple[int, Ways]:
    """Rungs of AdamW over tensors far larger than a cache."""
    side, count = (64, 3) if quick else (4096, 8) if device.type == "cuda" else (1024, 12)
    work = Work(ADAMW, [(side, side)] * count)

    def step(name: str) -> Call:
        return contenders.CONTENDERS[name].build(work.parameters(device)).step

    return work.numel, {
        COPY: Way(lambda: contenders.copy_of_bytes(work, device).run, 28, counters=False),
        LOOP: Way(partial(step, LOOP), 80, counters=False),  # it finds in the L2 what it has just written
        FOREACH: Way(partial(step, FOREACH), 80),
        FUSED: Way(partial(step, FUSED), 28),
        COMPILED: Way(partial(step, COMPILED), 28, compiled=True),
        OURS: Way(partial(step, OURS), 28, seen=False),
    }


WORKS: Mapping[str, Callable[[torch.device, bool], tuple[int, Ways]]] = {
    ONCE: partial(squares, twice=False), TWICE: partial(squares, twice=True), NORM: norms, ADAMW: steps,
}  # fmt: skip
