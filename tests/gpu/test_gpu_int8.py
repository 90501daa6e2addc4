"""State in 8 bits on a GPU: what reads it there, and the roots that its kernels take."""

from __future__ import annotations

import pytest
import torch
from gpu_support import NEEDED
from int8_support import same

from pagedopt import PagedAdamW
from pagedopt.formats.int8 import CUDA_TEXT
from pagedopt.kernels import source

pytestmark = NEEDED


def test_a_view_that_begins_anywhere_leaves_the_same_bits() -> None:
    """Parameters and gradients one element off: no access of 16 bytes is aligned."""
    found = []
    for off in (0, 1):
        store = torch.zeros(2, 100_000 + off, device="cuda")
        value, grad = (half[off:].copy_(torch.linspace(-1, 1, 100_000, device="cuda")) for half in store)
        p = torch.nn.Parameter(value)
        p.grad = grad
        optimizer = PagedAdamW([p], lr=1e-2, state_format="int8")
        for _ in range(3):
            optimizer.step()
        found.append([t.detach().cpu() for t in (p, *optimizer.state[p].values())])
    assert same(*found)


def test_a_decay_on_the_device_is_asked_when_state_is_made() -> None:
    p = torch.nn.Parameter(torch.ones(5000, device="cuda"))
    p.grad = torch.ones_like(p)
    slow, fast = ((torch.tensor(beta, device="cuda"), torch.tensor(0.999, device="cuda")) for beta in (0.995, 0.9))
    optimizer = PagedAdamW([p], betas=slow, capturable=True, state_format="int8")
    with pytest.raises(ValueError, match=r"its decay beta1 is 0\.995"):
        optimizer.step()
    assert not optimizer.state
    optimizer.param_groups[0]["betas"] = fast
    for _ in range(2):
        optimizer.step()
    assert int(optimizer.state[p]["step"]) == 2


def test_decoded_state_lies_on_the_host() -> None:
    p = torch.nn.Parameter(torch.zeros(8_000_000, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = PagedAdamW([p], state_format="int8", device_budget=0)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    state = optimizer.decoded_state_dict()["state"][0]
    assert state["exp_avg_sq"].device.type == "cpu"
    assert torch.cuda.max_memory_allocated() - before < 160 << 20, "a stretch of 4 M elements at a time"
    assert torch.allclose(state["exp_avg"], torch.full((), 0.1))


def test_the_fast_root_is_the_root_of_every_float_that_it_meets() -> None:
    """All of 2^-60 to 2^60: rsqrt is an estimate, and another GPU's may differ."""
    cupy = pytest.importorskip("cupy")
    text = source._file("device.cuh") + (
        'extern "C" __global__ void check(unsigned first, unsigned long long* wrong) {\n'
        "    const float x = __uint_as_float(first + blockIdx.x * blockDim.x + threadIdx.x);\n"
        "    if (__float_as_uint(fast_root(x)) != __float_as_uint(sqrtf(x))) atomicAdd(wrong, 1ull);\n"
        "}\n"
    )
    check = cupy.RawKernel(text, "check", options=("-fmad=false",))
    wrong, first, last, stride = cupy.zeros(1, cupy.uint64), (127 - 60) << 23, (127 + 60) << 23, 1 << 23
    for begin in range(first, last, stride):
        check((stride // 256,), (256,), (cupy.uint32(begin), wrong))
    assert int(wrong[0]) == 0


def test_estimates_of_roots_are_near_for_every_share() -> None:
    """Within a fifth of a code: half of one would be too far for the comparison that follows."""
    cupy = pytest.importorskip("cupy")
    own = CUDA_TEXT.split("namespace int8 {")[1].split("constexpr int BLOCK_NUMEL")[0]
    text = (
        f"namespace int8 {{{own}}}\n"
        'extern "C" __global__ void check(unsigned first, int root, unsigned long long* wrong) {\n'
        "    const float x = __uint_as_float(first + blockIdx.x * blockDim.x + threadIdx.x);\n"
        "    const float found = root == 3 ? int8::about_cube_root(x) : int8::about_fourth_root(x);\n"
        "    const double want = root == 3 ? cbrt((double)x) : sqrt(sqrt((double)x));\n"
        "    if (!(fabs(found - want) < 0.2)) atomicAdd(wrong, 1ull);\n"
        "}\n"
    )
    check = cupy.RawKernel(text, "check", options=("-fmad=false",))
    wrong, stride = cupy.zeros(1, cupy.uint64), 1 << 23
    for root, first, last in ((3, 0, (127 + 21) << 23), (4, 127 << 23, (127 + 32) << 23)):
        for begin in range(first, last, stride):
            check((stride // 256,), (256,), (cupy.uint32(begin), root, wrong))
    assert int(wrong[0]) == 0
