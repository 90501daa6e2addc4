"""The kernels on a GPU: parity with the float64 reference over every transport, odd views, and sizes beyond 32 bits."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from gpu_support import launching
from int8_support import same
from rules_under_test import PARTS, same_values, special_inputs
from support import (
    BAND,
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    SIZES,
    Lists,
    assert_updated,
    lists_for,
    on,
    same_bits,
    scalars_for,
)

from experiments.works.trace import counted
from pagedopt import PagedAdamW, multi_tensor_apply
from pagedopt.foreach_ops import foreach_norm
from pagedopt.formats.int8 import CUDA_TEXT
from pagedopt.kernels import source
from pagedopt.rules import RULES, Rule
from pagedopt.transports.by_value import StructTransport
from pagedopt.transports.choose import TRANSPORTS

pytestmark = launching()

ADAMW = RULES["adamw"]
MIXES = {str(dtype)[6:]: (dtype,) * 4 for dtype in DTYPES} | {
    "bfloat16, state float32": (BF16, BF16, F32, F32),
    "float32, gradient float16, state bfloat16": (F32, F16, BF16, BF16),
}


def check(rule: Rule, dtypes: tuple[torch.dtype, ...], transport: str | StructTransport, gap: int) -> Lists:
    before = lists_for(rule, SIZES, dtypes)
    after, scalars = on("cuda", before, gap), scalars_for(rule)
    multi_tensor_apply(rule, after, scalars, transport=transport)
    assert_updated(rule, before, after, scalars)
    for t in itertools.chain(*after):
        assert t is not None
        if t.numel():
            assert (t.as_strided((gap,), (1,), 0) == 7).all(), "written in front of a view"
            assert (t.as_strided((BAND,), (1,), gap + t.numel()) == 7).all(), "written behind a view"
    return after


@pytest.mark.parametrize("dtypes", MIXES.values(), ids=MIXES.keys())
def test_transports_and_views_agree_with_the_reference_and_to_the_bit(dtypes: tuple[torch.dtype, ...]) -> None:
    """However a table comes, and at whichever element a view begins."""
    ways: list[tuple[str | StructTransport, int]] = [(name, 0) for name in sorted(TRANSPORTS)]
    if torch.cuda.get_device_capability() >= (7, 0) and int((torch.version.cuda or "0").split(".")[0]) >= 13:
        ways.append((StructTransport(torch.cuda.current_device(), 32764), 0))
    first, *others = (check(ADAMW, dtypes, *way) for way in (*ways, *(("managed", gap) for gap in (1, 2, 3, 5))))
    assert all(same_bits(first, other) for other in others)


def test_a_few_lists_misaligned_among_aligned_ones() -> None:
    before = lists_for(ADAMW, SIZES, MIXES["float32"])
    aligned, mixed = on("cuda", before), [*on("cuda", before)[:2], *on("cuda", before, 1)[2:]]
    for lists in (aligned, mixed):
        multi_tensor_apply(ADAMW, lists, scalars_for(ADAMW))
    assert same_bits(aligned, mixed)


@pytest.mark.parametrize("name", ["extremes", "choices", "powers", "functions"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_the_language_of_rules(name: str, dtype: torch.dtype) -> None:
    rule, in_torch, roundings = PARTS[name]
    inputs = special_inputs(rule, dtype)
    lists: Lists = [[t.cuda()] for t in inputs]
    multi_tensor_apply(rule, lists)
    for j, want in zip(rule.writes, in_torch(*inputs), strict=True):
        assert same_values(lists[j][0].cpu(), want, roundings), f"{rule.inputs[j]}: {lists[j][0]} is not {want}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_norms(order: float, dtype: torch.dtype) -> None:
    """The bits of a CPU through every transport; tests/test_foreach_ops.py compares them with torch on both."""
    for sizes in ((2, 3, 4097, 40_001, 70), (5, 1000, 31), (1025 * 2048 + 5, 6), (6,) * 3000):
        tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in sizes]
        tensors[-1][-1] = torch.finfo(dtype).max
        want, moved = torch.stack(foreach_norm(tensors, order)), [t.cuda() for t in tensors]
        for transport in TRANSPORTS:
            got = torch.stack(foreach_norm(moved, order, transport=transport))
            assert torch.equal(got.cpu(), want), transport


def test_norms_of_a_list_take_few_launches() -> None:
    """A fill, the sums, the root and its rounding; with large tensors a fill and the sums of chunks, too."""
    tiny, large = torch.rand(10_000, 6, device="cuda"), torch.ones(100_000, device="cuda")
    for tensors, most in ((list(tiny), 4), ([*tiny, large], 6)):
        foreach_norm(tensors)
        assert counted(lambda tensors=tensors: foreach_norm(tensors)).kernels <= most


# ---- beyond 32 bits ----

SLICE = 1 << 27
GUARD = 4096


def fill(room: torch.Tensor) -> None:
    """Element i is i % 251, exact in 16 bits and out of step with every power of two."""
    for start in range(0, len(room), SLICE):
        end = min(start + SLICE, len(room))
        room[start:end] = torch.arange(start, end, device="cuda") % 251


def assert_doubled(room: torch.Tensor, begin: int, end: int) -> None:
    """Elements from ``begin`` to ``end`` are doubled, those around are as they were."""
    for start in range(0, len(room), SLICE):
        stop = min(start + SLICE, len(room))
        index = torch.arange(start, stop, device="cuda")
        want = (index % 251) * torch.where((index >= begin) & (index < end), 2, 1)
        wrong = torch.nonzero(room[start:stop] != want.to(room.dtype))
        assert not len(wrong), f"{len(wrong)} elements are wrong, the first is {start + int(wrong[0])} of {len(room)}"


def need_memory(nbytes: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < nbytes:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB of device memory, {free / 1e9:.1f} GB are free")


@pytest.mark.exclusive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**31 + 65_536])
def test_a_tensor_of_two_to_the_31_elements(numel: int) -> None:
    """4.3 GB of bfloat16 between guard bands; every element is looked at."""
    need_memory(12 << 30)
    room = torch.empty(numel + 2 * GUARD, dtype=BF16, device="cuda")
    fill(room)
    multi_tensor_apply(RULES["mul_scalar"], [[room[GUARD : GUARD + numel]]], {"scalar": 2.0})
    assert_doubled(room, GUARD, GUARD + numel)
    del room
    torch.cuda.empty_cache()


@pytest.mark.exclusive
@pytest.mark.timeout(300)
def test_tensors_of_more_than_two_to_the_32_elements_together() -> None:
    """Five times 2**30 bfloat16 elements, 10.7 GB, in one launch."""
    need_memory(18 << 30)
    rooms = [torch.empty((1 << 30) + i, dtype=BF16, device="cuda") for i in range(5)]
    for room in rooms:
        fill(room)
    multi_tensor_apply(RULES["mul_scalar"], [rooms], {"scalar": 2.0})
    for room in rooms:
        assert_doubled(room, 0, len(room))
    del rooms, room
    torch.cuda.empty_cache()


# ---- devices ----


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


@two_gpus
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_tensors_on_a_device_that_is_not_current(transport: str) -> None:
    before = lists_for(ADAMW, SIZES, MIXES["float32"])
    after = on("cuda:1", before)
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    multi_tensor_apply(ADAMW, after, scalars_for(ADAMW), transport=transport)
    assert torch.cuda.current_device() == 0
    assert_updated(ADAMW, before, after, scalars_for(ADAMW))


# ---- state in 8 bits: what reads it on a GPU, and the roots that its kernels take ----


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


IN_8_BITS = f"namespace int8 {{{CUDA_TEXT.split('namespace int8 {')[1].split('constexpr int BLOCK_NUMEL')[0]}}}"
#: What is right of which text, for every float between two exponents: all that its kernels take a root of.
#: ``rsqrt`` is an estimate, and another GPU's may differ.  The others are within a fifth of a code: half of one would
#: be too far for the comparison that follows.
ROOTS: dict[str, tuple[str, str, int, int]] = {
    "fast": (source._file("device.cuh"), "__float_as_uint(fast_root(x)) == __float_as_uint(sqrtf(x))", -60, 60),
    "cube": (IN_8_BITS, "fabs(int8::about_cube_root(x) - cbrt((double)x)) < 0.2", -127, 21),
    "fourth": (IN_8_BITS, "fabs(int8::about_fourth_root(x) - sqrt(sqrt((double)x))) < 0.2", 0, 32),
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_root_is_right_for_every_float_that_it_meets(name: str) -> None:
    cupy = pytest.importorskip("cupy")
    text, right, first, last = ROOTS[name]
    text += (
        '\nextern "C" __global__ void check(unsigned first, unsigned long long* wrong) {\n'
        "    const float x = __uint_as_float(first + blockIdx.x * blockDim.x + threadIdx.x);\n"
        f"    if (!({right})) atomicAdd(wrong, 1ull);\n"
        "}\n"
    )
    check, wrong = cupy.RawKernel(text, "check", options=("-fmad=false",)), cupy.zeros(1, cupy.uint64)
    for exponent in range(127 + first, 127 + last):
        check(((1 << 23) // 256,), (256,), (cupy.uint32(exponent << 23), wrong))
    assert int(wrong[0]) == 0
