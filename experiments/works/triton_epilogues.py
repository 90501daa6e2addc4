"""A user's own Triton kernel, and what may follow it in a compiled function."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCK = 1024
Calls = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@triton.jit
def kernel(x, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < numel)
    tl.store(out + at, value * value, at < numel)


@triton.jit
def kernel_of_two(x, out, more, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < numel)
    tl.store(out + at, value * value, at < numel)
    tl.store(more + at, value + value, at < numel)


def squared(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Into ``out``, which is returned."""
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def fresh(x: torch.Tensor) -> torch.Tensor:
    """Into new memory."""
    return squared(x, torch.empty_like(x))


def both(x: torch.Tensor) -> torch.Tensor:
    """The sum of what a kernel with two stores gives."""
    out, more = torch.empty_like(x), torch.empty_like(x)
    kernel_of_two[(triton.cdiv(x.numel(), BLOCK),)](x, out, more, x.numel(), BLOCK=BLOCK)
    return torch.relu(out) + more


#: What follows; a compiler could do the whole in one kernel, but for the sum over rows and the transposed one.
EPILOGUES: dict[str, Calls] = {
    "nothing": lambda x, y: fresh(x),
    "relu": lambda x, y: torch.relu(fresh(x)),
    "relu, and times another tensor": lambda x, y: torch.relu(fresh(x)) * y,
    "cast to float16": lambda x, y: fresh(x).half(),
    "its result used twice": lambda x, y: torch.stack([(z := fresh(x)), torch.relu(z)]),
    "into zeros, then relu": lambda x, y: torch.relu(squared(x, torch.zeros_like(x))),
    "a kernel with two stores": lambda x, y: both(x),
    "a sum over rows": lambda x, y: fresh(x).sum(1),
    "transposed, then relu": lambda x, y: torch.relu(fresh(x).t().contiguous()),
}


@triton.jit
def muladd_kernel(a, b, c, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(a + at, at < numel) * tl.load(b + at, at < numel) + c, at < numel)


@torch.library.triton_op("lecture::muladd_in_triton", mutates_args=())
def muladd(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """The lecture's ``mymuladd``, of which a compiler sees the kernel."""
    out = torch.empty_like(a)
    grid = (triton.cdiv(a.numel(), BLOCK),)
    torch.library.wrap_triton(muladd_kernel)[grid](a, b, c, out, a.numel(), BLOCK=BLOCK)
    return out
