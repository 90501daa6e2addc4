"""Small kernels in Triton: the square of each element's square, and the lecture's ``mymuladd``, shown to a compiler."""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def kernel(x, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < numel)
    value = value * value
    tl.store(out + at, value * value, at < numel)


def squared(x: torch.Tensor, out: torch.Tensor) -> Any:
    """Into ``out``, which is returned."""
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def muladd_kernel(a, b, c, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(a + at, at < numel) * tl.load(b + at, at < numel) + c, at < numel)


@torch.library.triton_op("lecture::muladd_in_triton", mutates_args=())
def muladd(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """A compiler sees the kernel."""
    out = torch.empty_like(a)
    grid = (triton.cdiv(a.numel(), 1024),)
    torch.library.wrap_triton(muladd_kernel)[grid](a, b, c, out, a.numel(), BLOCK=1024)
    return out
