"""The square of each element, and its square, in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def kernel(x, out, numel, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < numel)
    value = value * value
    if TWICE:
        value = value * value
    tl.store(out + at, value, at < numel)


def squared(x: torch.Tensor, out: torch.Tensor, twice: bool) -> Any:
    """Into ``out``, which is returned."""
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), TWICE=twice, BLOCK=BLOCK, num_warps=8)
    return out
