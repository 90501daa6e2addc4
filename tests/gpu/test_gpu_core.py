"""The kernels on a GPU: parity with the float64 reference over every transport, odd views, and sizes beyond 32 bits."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from gpu_support import launching
from rules_under_test import PARTS, copied, same_values, special_inputs
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
from pagedopt import Sweep, multi_tensor_apply
from pagedopt.foreach_ops import foreach_norm
from pagedopt.rules import RULES, Rule
from pagedopt.transports.by_value import StructTransport
from pagedopt.transports.choose import TRANSPORTS

pytestmark = launching()

ADAMW = RULES["adamw"]
MIXES = {str(dtype)[6:]: (dtype,) * 4 for dtype in DTYPES} | {
    "bfloat16, state float32": (BF16, BF16, F32, F32),
    "float32, gradient float16, state bfloat16": (F32, F16, BF16, BF16),
}


def check(rule: Rule, dtypes: tuple[torch.dtype, ...], transport: str | StructTransport, gap: int = 0) -> Lists:
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
def test_transports_agree_with_the_reference_and_to_the_bit(dtypes: tuple[torch.dtype, ...]) -> None:
    results = [check(ADAMW, dtypes, transport) for transport in sorted(TRANSPORTS)]
    if torch.cuda.get_device_capability() >= (7, 0) and int((torch.version.cuda or "0").split(".")[0]) >= 13:
        results.append(check(ADAMW, dtypes, StructTransport(torch.cuda.current_device(), 32764)))
    for other in results[1:]:
        assert same_bits(results[0], other)


@pytest.mark.parametrize("gap", [1, 2, 3, 5])
@pytest.mark.parametrize("dtypes", list(MIXES.values())[:5], ids=list(MIXES)[:5])
def test_views_aligned_to_an_element_only(dtypes: tuple[torch.dtype, ...], gap: int) -> None:
    assert same_bits(check(ADAMW, dtypes, "managed"), check(ADAMW, dtypes, "managed", gap))


def test_a_few_lists_misaligned_among_aligned_ones() -> None:
    before = lists_for(ADAMW, SIZES, MIXES["float32"])
    aligned, mixed = on("cuda", before), [*on("cuda", before)[:2], *on("cuda", before, 1)[2:]]
    for lists in (aligned, mixed):
        multi_tensor_apply(ADAMW, lists, scalars_for(ADAMW))
    assert same_bits(aligned, mixed)


@pytest.mark.parametrize("transport", ["managed", "struct"])
@pytest.mark.parametrize("sizes", [(5, 0, 1024, 77) * 100, (40_000, 3, 0, 4097)], ids=["warps", "blocks"])
def test_sets_of_scalars_and_absent_tensors(sizes: tuple[int, ...], transport: str) -> None:
    before = lists_for(ADAMW, sizes, MIXES["float32"])
    before[1][3] = None
    after = on("cuda", before)
    sets = [i % 3 for i in range(len(sizes))]
    scalars = [scalars_for(ADAMW, step) for step in (3, 1, 8)]
    sweep = Sweep(ADAMW, after, sets=3, transport=transport)
    sweep.table.host.set_sets(sets)
    sweep.run([ADAMW.uniforms(s) for s in scalars])
    assert_updated(ADAMW, before, after, *scalars, sets=sets)
    for j in (0, 2, 3):
        assert torch.equal(after[j][3].cpu(), before[j][3])


@pytest.mark.parametrize("name", ["extremes", "choices", "powers", "functions"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_the_language_of_rules(name: str, dtype: torch.dtype) -> None:
    rule, in_torch, roundings = PARTS[name]
    inputs = special_inputs(rule, dtype)
    lists: Lists = [[t.cuda()] for t in inputs]
    multi_tensor_apply(rule, lists)
    for j, want in zip(rule.writes, in_torch(*inputs), strict=True):
        assert same_values(lists[j][0].cpu(), want, roundings), f"{rule.inputs[j]}: {lists[j][0]} is not {want}"


@pytest.mark.parametrize("target", [F16, BF16], ids=str)
def test_conversions_are_those_of_torch(target: torch.dtype) -> None:
    bits = torch.arange(-(1 << 31), 1 << 31, 1021, dtype=torch.int64).to(torch.int32)
    values = bits.view(F32).cuda()
    narrow = torch.zeros(len(values), dtype=target, device="cuda")
    multi_tensor_apply(copied, [[values], [narrow]])
    assert same_values(narrow.float().cpu(), values.cpu().to(target).float())
    wide = torch.zeros(len(values), device="cuda")
    multi_tensor_apply(copied, [[narrow], [wide]])
    assert same_values(wide.cpu(), narrow.cpu().float())


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
