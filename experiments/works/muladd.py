"""The lecture's ``mymuladd``, a * b + c: a kernel that torch cannot look into, as an operator told more and more of.

The lecture has it in C++, where ``m.def``, ``m.impl`` and ``register_fake`` say the same.  It writes ``torch.check``,
which does not exist; it is ``torch._check``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

Operator = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
NOTHING, OP, FAKE, AUTOGRAD, NOW = (
    "nothing", "an operator", "and a fake", "and its gradient", "all by custom_op, and how to batch",
)  # fmt: skip
LEVELS = (NOTHING, OP, FAKE, AUTOGRAD, NOW)
SCHEMA = "(Tensor a, Tensor b, float c) -> Tensor"
CUDA = r"""
extern "C" __global__ void muladd(const float* a, const float* b, float c, float* out, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
        out[i] = a[i] * b[i] + c;
}
"""


@functools.cache
def _loop() -> Any:
    numba = importlib.import_module("numba")

    def muladd(a, b, c, out):
        for i in range(len(a)):
            out[i] = a[i] * b[i] + c

    return numba.njit(muladd)


@functools.cache
def _kernel() -> Any:
    return importlib.import_module("cupy").RawKernel(CUDA, "muladd")


def kernel(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """On torch's current stream, or by Numba; of contiguous float32."""
    out = torch.empty_like(a)
    if a.is_cuda:
        cupy, numpy = importlib.import_module("cupy"), importlib.import_module("numpy")
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            given = (a.data_ptr(), b.data_ptr(), numpy.float32(c), out.data_ptr(), a.numel())
            _kernel()((64,), (256,), given)
    else:
        flat = (t.detach().reshape(-1).numpy() for t in (a, b))
        _loop()(*flat, c, out.view(-1).numpy())
    return out


def fake(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """What is known without values: the lecture's four checks, and the result's shape."""
    torch._check(a.shape == b.shape)
    torch._check(a.dtype == torch.float)
    torch._check(b.dtype == torch.float)
    torch._check(a.device == b.device)
    return torch.empty_like(a)


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Save what the gradient needs."""
    ctx.save_for_backward(*inputs[:2])


def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Of a * b + c."""
    a, b = ctx.saved_tensors
    return grad * b, grad * a, None


def batched(info: Any, dims: Any, a: torch.Tensor, b: torch.Tensor, c: float) -> tuple[torch.Tensor, int]:
    """Every element for itself: a batch is a tensor with one dimension more."""
    a, b = (
        t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip((a, b), dims, strict=False)
    )
    return torch.ops.lecture.now(a.contiguous(), b.contiguous(), c), 0


@functools.cache
def library() -> torch.library.Library:
    """Keeps the operators alive."""
    return torch.library.Library("lecture", "FRAGMENT")


@functools.cache
def told(level: str) -> Operator:
    """``mymuladd``, of which torch is told so much."""
    if level == NOTHING:
        return kernel
    if level == NOW:
        made = torch.library.custom_op("lecture::now", kernel, mutates_args=(), schema=SCHEMA)
        made.register_fake(fake)
        made.register_autograd(backward, setup_context=setup_context)
        made.register_vmap(batched)
        return made
    lib, name = library(), f"mymuladd_{LEVELS.index(level)}"
    lib.define(f"{name}{SCHEMA}")
    lib.impl(name, kernel, "CPU")
    lib.impl(name, kernel, "CUDA")
    if level in (FAKE, AUTOGRAD):
        torch.library.register_fake(f"lecture::{name}", fake, lib=lib)
    if level == AUTOGRAD:
        torch.library.register_autograd(f"lecture::{name}", backward, setup_context=setup_context, lib=lib)
    found: Operator = getattr(torch.ops.lecture, name)
    return found
