"""The square of each element's square, in Triton."""

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
