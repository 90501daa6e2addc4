"""State in 8 bits on a GPU: the bits of the CPU, wherever the state lies and however a step reaches it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from int8_support import same

from pagedopt import PagedAdamW, PagedLion, PagedSGD
from pagedopt.formats.int8 import CUDA_TEXT
from pagedopt.kernels import source

pytestmark = NEEDED

SHAPES = ((300, 257), (4096,), (64,), (3, 700), (1_000_003,), (4097,), (70_000,))
KINDS: dict[str, Any] = {
    "stochastic": functools.partial(PagedAdamW, seed=7),
    "nearest": functools.partial(PagedAdamW, rounding="nearest"),
    "amsgrad": functools.partial(PagedAdamW, amsgrad=True),
    "lion": PagedLion,
    "momentum": functools.partial(PagedSGD, momentum=0.9),
}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "staged": {"device_budget": 0},
    "half staged": {"device_budget": "50%"},
    "in place": {"device_budget": 0, "host_access": "in_place"},
    "in place, 3 blocks": {"device_budget": 0, "host_access": "in_place", "blocks": 3},
    "struct": {"transport": "struct"},
    "managed": {"placement": "managed", "device_budget": 0},
    "host": {"placement": "host"},
}
STEPS = 6


def gradient(p: torch.Tensor, step: int, i: int) -> torch.Tensor | None:
    """Late in two parameters, of another size in each step, with blocks of zeros and what is not finite."""
    if step < 2 and i in (1, 4):
        return None
    generator = torch.Generator().manual_seed(100 * step + i)
    grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step - 3)
    flat = grad.view(-1)
    flat[100:900] = 0
    if step == 3 and len(flat) > 3000:
        flat[1000], flat[1300], flat[1600], flat[1700:2100] = float("inf"), float("nan"), 1e25, 1e-30
    return grad.to(p)


@functools.cache
def run(kind: str, place: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters and state after some steps, on the host."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    params = [torch.nn.Parameter(p) for p in made]
    optimizer = KINDS[kind](params, lr=1e-2, state_format="int8", **PLACES[place])
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = gradient(p, step, i)
        optimizer.step()
    return [t.detach().cpu() for p in params for t in (p, *optimizer.state[p].values())]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_leaves_the_bits_of_a_cpu(kind: str, dtype: torch.dtype, place: str) -> None:
    want, found = run(kind, "resident", "cpu", dtype), run(kind, place, "cuda", dtype)
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert same([a], [b]), f"tensor {i}"


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


def strided(device: str, changes: bool, place: str) -> tuple[PagedAdamW, torch.nn.Parameter]:
    """After four steps on gradients that differ by channel; the strides of the parameter may change in the middle."""
    shape = (30, 40, 7, 9)
    p = torch.nn.Parameter(torch.linspace(-1, 1, 75_600).view(shape).to(device))
    optimizer = PagedAdamW([p], lr=1e-2, state_format="int8", seed=5, **PLACES[place])
    for step in range(4):
        if changes and step == 2:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        grad = torch.sin(torch.arange(75_600.0) * (step + 1)).view(shape) * torch.logspace(-3, 1, 40).view(-1, 1, 1)
        p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()
    return optimizer, p


@pytest.mark.parametrize("place", PLACES)
def test_strides_may_change_and_codes_load_into_others_and_into_floats(place: str) -> None:
    """As on a CPU, where strides change in no step."""
    (opt, p), (still, q) = strided("cuda", True, place), strided("cpu", False, "resident")
    state, want = opt.decoded_state_dict()["state"][0], still.decoded_state_dict()["state"][0]
    assert same([p.detach().cpu(), *state.values()], [q.detach(), *want.values()])
    q.data = q.data.contiguous(memory_format=torch.channels_last)
    loaded = PagedAdamW([p], state_format="int8", **PLACES[place]), PagedAdamW([q], state_format="int8")
    for one in loaded:
        one.load_state_dict(still.state_dict())
    assert same([t.cpu() for t in loaded[0].state[p].values()], list(loaded[1].state[q].values()))
    for dtype in (torch.float32, torch.bfloat16):
        plain = PagedAdamW([p], state_format=dtype, **PLACES[place])
        plain.load_state_dict(opt.state_dict())
        assert all(torch.equal(plain.state[p][name].cpu(), want[name].to(dtype)) for name in ("exp_avg", "exp_avg_sq"))
    opt.load_state_dict(opt.state_dict())
    assert same([t.cpu() for t in opt.state[p].values()], list(loaded[1].state[q].values()))
    p.grad = torch.ones_like(p)
    opt.step()


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
