"""What can be fused vertically, in ways that fuse it and in ways that do not, each with the bytes that it must move.

A square of each element; its square again; LayerNorm and tanh over rows; a step of AdamW.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from experiments.works import contenders
from experiments.works.contenders import COMPILED, COPY, FOREACH, FUSED, LOOP, OURS
from experiments.works.models import Work
from experiments.works.norm_tanh import NormTanh
from experiments.works.witnesses import Call, Way, Works
from pagedopt import multi_tensor_apply, rule

ONCE, TWICE, NORM, ADAMW = "square", "square of square", "LayerNorm and tanh", "AdamW"
EAGER, BY_COMPILER, LIST = "eager", "torch.compile", "one kernel over a pointer list (ours)"
RULE, RULES, JITERATOR = "one rule (ours)", "two rules (ours)", "jiterator"
DIM = 256
Ways = dict[str, Way]
CUDA = r"""
extern "C" __global__ void squared(const float4* x, float4* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = x[i];
    for (int k = 0; k < 2; ++k) v.x *= v.x, v.y *= v.y, v.z *= v.z, v.w *= v.w;
    out[i] = v;
}
"""


def once(x):
    return x * x


def again(x):
    y = x * x
    return y * y


square, square_of_square = rule(once), rule(again)


def ruled(x: torch.Tensor, out: torch.Tensor, *rules: Any) -> Call:
    """A launch of ours for each rule, with what lies between two of them in memory."""
    between = [torch.empty_like(x) for _ in rules[1:]]

    def run() -> torch.Tensor:
        for each, source, target in zip(rules, [x, *between], [*between, out], strict=True):
            multi_tensor_apply(each, [[source]], out=[[target]])
        return out

    return run


def jiterator(x: torch.Tensor, out: torch.Tensor) -> Call:
    """In torch's compiler of functions on scalars, which gives new memory."""
    text = "template <typename T> T squared(T x) { T y = x * x; return y * y; }"
    return partial(torch.cuda.jiterator._create_jit_fn(text), x)


def cupy_elementwise(x: torch.Tensor, out: torch.Tensor) -> Call:
    """In CuPy's; torch's default stream is CuPy's, too."""
    cupy = importlib.import_module("cupy")
    kernel = cupy.ElementwiseKernel("float32 x", "float32 y", "float z = x * x; y = z * z", "squared_twice")
    source, target = cupy.asarray(x), cupy.asarray(out)

    def run() -> torch.Tensor:
        kernel(source, target)
        return out

    return run


def triton(x: torch.Tensor, out: torch.Tensor) -> Call:
    """In Triton."""
    return partial(importlib.import_module("experiments.works.triton_square").squared, x, out)


def nvrtc(x: torch.Tensor, out: torch.Tensor) -> Call:
    """In torch's private wrapper of NVRTC."""
    kernel, vectors = torch.cuda._compile_kernel(CUDA, "squared"), x.numel() // 4

    def run() -> torch.Tensor:
        kernel(grid=(-(-vectors // 256), 1, 1), block=(256, 1, 1), args=[x, out, vectors])
        return out

    return run


#: Of others, for the square of a square.
OTHERS = {
    JITERATOR: jiterator,
    "CuPy ElementwiseKernel": cupy_elementwise,
    "Triton": triton,
    "torch.cuda._compile_kernel": nvrtc,
}


def squares(device: torch.device, quick: bool, twice: bool) -> tuple[int, Ways]:
    """Over a GiB of float32; on a CPU a quarter of that."""
    x = torch.rand(1 << (14 if quick else 28 if device.type == "cuda" else 26), device=device)
    out = torch.empty_like(x)
    function, fused = (again, square_of_square) if twice else (once, square)
    ways = {
        COPY: Way(lambda: partial(out.copy_, x), 8),
        EAGER: Way(lambda: partial(function, x), 16 if twice else 8),
        BY_COMPILER: Way(lambda: partial(torch.compile(function, dynamic=False), x), 8, compiled=True),
        RULE: Way(lambda: ruled(x, out, fused), 8, seen=False),
    }
    if twice:
        ways[RULES] = Way(lambda: ruled(x, out, square, square), 16, seen=False)
    if twice and device.type == "cuda":
        ways |= {name: Way(partial(make, x, out), 8, seen=False) for name, make in OTHERS.items()}
    return x.numel(), ways


def norm_tanh(x: torch.Tensor) -> torch.Tensor:
    """As one writes it."""
    return torch.tanh(torch.nn.functional.layer_norm(x, (DIM,), eps=0))


def norms(device: torch.device, quick: bool) -> tuple[int, Ways]:
    """Over rows of 256."""
    x = torch.rand(16 if quick else 1 << (20 if device.type == "cuda" else 16), DIM, device=device)
    return x.numel(), {
        COPY: Way(lambda: partial(torch.empty_like(x).copy_, x), 8),
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

    ways = {COPY: Way(lambda: contenders.copy_of_bytes(work, device).run, 28)}
    for name, due in {LOOP: 80, FOREACH: 80, FUSED: 28, COMPILED: 28, OURS: 28}.items():
        ways[name] = Way(partial(step, name), due, compiled=name == COMPILED, seen=name != OURS)
    return work.numel, ways


WORKS: Works = {ONCE: partial(squares, twice=False), TWICE: partial(squares, twice=True), NORM: norms, ADAMW: steps}
