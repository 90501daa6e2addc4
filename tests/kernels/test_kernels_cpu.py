"""The Numba kernels against the float64 reference, through multi_tensor_apply and Sweep on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rules_under_test import MANY, PARTS, copied, filled, many, same_values, special_inputs, steps, steps_in_torch, swap
from support import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    SIZES,
    Lists,
    assert_updated,
    clone,
    expected,
    lists_for,
    same_bits,
    scalars_for,
    tail_of,
    threads,
    vast,
)

from pagedopt import Sweep, multi_tensor_apply
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import Geometry


def mixes(rule: Rule) -> Iterator[tuple[torch.dtype, ...]]:
    """All lists alike, and for rules with state the mixes that training uses: (param, grad, state…)."""
    for dtype in DTYPES:
        yield (dtype,) * len(rule.inputs)
    state = len(rule.inputs) - 2
    if rule.inputs[0] == "param":
        yield (BF16, BF16, *[F32] * state)
        yield (F32, F16, *[BF16] * state)
        yield (F16, F64, *[F32] * state)


CASES = [
    pytest.param(
        RULES[name],
        dtypes,
        id=f"{name}-{'-'.join(str(d)[6:] for d in dtypes)}",
        marks=[pytest.mark.long] if dtypes[0] == F16 and name != "adamw" else [],
    )
    for name in RULES
    for dtypes in mixes(RULES[name])
]


@pytest.mark.parametrize(("rule", "dtypes"), CASES)
def test_kernel_is_the_reference(rule: Rule, dtypes: tuple[torch.dtype, ...]) -> None:
    before = lists_for(rule, SIZES, dtypes)
    after, scalars = clone(before), scalars_for(rule)
    multi_tensor_apply(rule, after, scalars)
    want = expected(rule, before, [scalars], [0] * len(SIZES))
    assert_updated(rule, before, after, want, dtypes)
    for j in set(range(len(dtypes))) - set(rule.writes):
        assert all(torch.equal(a, b) for a, b in zip(before[j], after[j], strict=True)), "an input was written"


@pytest.mark.parametrize("name", RULES)
def test_out_of_place_leaves_the_inputs(name: str) -> None:
    rule, dtypes = RULES[name], (F32,) * len(RULES[name].inputs)
    before = lists_for(rule, SIZES, dtypes)
    kept, scalars = clone(before), scalars_for(rule)
    out: Lists = [[torch.full_like(t, 7.0) for t in before[j]] for j in rule.writes]
    multi_tensor_apply(rule, before, scalars, out=out)
    assert same_bits(before, kept)
    inplace = clone(kept)
    multi_tensor_apply(rule, inplace, scalars)
    for j, results in zip(rule.writes, out, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(inplace[j], results, strict=True))


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "adamw"])
def test_flags_reach_the_kernel(name: str) -> None:
    rule, dtypes = RULES[name], (F32,) * len(RULES[name].inputs)
    before = lists_for(rule, (4097,), dtypes)
    flags = {"maximize": 1.0, "step": 1.0, "nesterov": 0.0, "weight_decay": 0.0}
    scalars = scalars_for(rule, **{k: v for k, v in flags.items() if k in rule.scalars})
    after = clone(before)
    multi_tensor_apply(rule, after, scalars)
    assert_updated(rule, before, after, expected(rule, before, [scalars], [0]), dtypes)


@pytest.mark.parametrize("gap", [1, 3])
@pytest.mark.parametrize("dtypes", [(F32,) * 4, (BF16, BF16, F32, F32)], ids=["float32", "bfloat16"])
def test_views_aligned_to_an_element_only(dtypes: tuple[torch.dtype, ...], gap: int) -> None:
    rule = RULES["adamw"]
    aligned, shifted = lists_for(rule, SIZES, dtypes), lists_for(rule, SIZES, dtypes, gap=gap)
    for lists in (aligned, shifted):
        multi_tensor_apply(rule, lists, scalars_for(rule))
    for x, y in zip(aligned, shifted, strict=True):
        for a, b in zip(x, y, strict=True):
            assert torch.equal(a, b)
            if b.numel():
                around = b.as_strided((gap + b.numel() + gap,), (1,), 0)
                assert (around[:gap] == 7).all()
                assert (around[-gap:] == 7).all(), "written past the end of a view"


def test_each_row_takes_its_own_set_of_scalars() -> None:
    rule, dtypes = RULES["adamw"], (F32,) * 4
    sizes, sets = (5000, 3, 700, 2049), (2, 0, 1, 2)
    before = lists_for(rule, sizes, dtypes)
    after = clone(before)
    scalars = [scalars_for(rule, lr=lr, weight_decay=wd) for lr, wd in ((0.3, 0.2), (0.05, 0.0), (0.7, 0.5))]
    sweep = Sweep(rule, after, sets=3)
    sweep.table.host.set_sets(sets)
    sweep.run([rule.uniforms(s) for s in scalars])
    assert_updated(rule, before, after, expected(rule, before, scalars, sets), dtypes)


def test_absent_tensors_are_skipped() -> None:
    rule, dtypes = RULES["adamw"], (F32,) * 4
    before = lists_for(rule, (3000, 40, 4097), dtypes)
    before[1][1] = None
    after = clone(before)
    Sweep(rule, after).run(scalars_for(rule))
    assert_updated(rule, before, after, expected(rule, before, [scalars_for(rule)], [0] * 3), dtypes)
    for j in (0, 2, 3):
        assert torch.equal(after[j][1], before[j][1])


def test_a_list_that_was_absent_at_first_brings_its_dtype() -> None:
    rule, dtypes = RULES["sgd"], (BF16, BF16)
    before = lists_for(rule, (3000, 40), dtypes)
    after = clone(before)
    sweep = Sweep(rule, [after[0], [None, None]])
    sweep.refresh(after)
    sweep.run(scalars_for(rule))
    assert_updated(rule, before, after, expected(rule, before, [scalars_for(rule)], [0] * 2), dtypes)
    sweep = Sweep(rule, [after[0], [None, None]])
    with pytest.raises(TypeError, match=r"grad is torch\.int32"):
        sweep.refresh([None, [torch.ones(3000).int(), None]])


def test_many_steps_drift_by_rounding_only() -> None:
    rule, dtypes = RULES["adamw"], (F32,) * 4
    after = lists_for(rule, (4097,), dtypes)
    exact = [tensors[0].double() for tensors in after]
    sweep = Sweep(rule, after)
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 41):
        after[1][0].copy_(torch.randn(4097, generator=generator))
        exact[0], exact[2], exact[3] = rule.reference(
            exact[0], after[1][0].double(), *exact[2:], **scalars_for(rule, step, lr=0.03)
        )
        sweep.run(scalars_for(rule, step, lr=0.03))
    torch.testing.assert_close(after[0][0].double(), exact[0], rtol=3e-6, atol=3e-6)
    assert (exact[0] - lists_for(rule, (4097,), dtypes)[0][0]).abs().median() > 0.1


@pytest.mark.parametrize("shape", [Geometry(48, 32), Geometry(4080, 512), Geometry(1 << 20, 512)], ids=str)
def test_how_the_work_is_cut_changes_no_bit(shape: Geometry) -> None:
    rule, dtypes = RULES["adamw"], (F32,) * 4
    one, other = lists_for(rule, SIZES, dtypes), lists_for(rule, SIZES, dtypes)
    Sweep(rule, one).run(scalars_for(rule))
    Sweep(rule, other, geometry=shape).run(scalars_for(rule))
    assert same_bits(one, other)


def test_threads_change_no_bit() -> None:
    rule, dtypes = RULES["adamw"], (F32,) * 4
    sizes = (70_001, 1, 0, 33_000, 5, 20_000)
    results = []
    for count in (1, 2, 5):
        lists = lists_for(rule, sizes, dtypes)
        for _ in range(2):
            with threads(count):
                Sweep(rule, lists).run(scalars_for(rule))
        results.append(lists)
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("numel", [2**31 + 4104, 2**32 + 4104])
def test_offsets_beyond_32_bits(numel: int) -> None:
    """The last chunks of a tensor of 8.6 GB, of which a few pages exist."""
    room = vast(numel)
    room[-5000:] = 3  # from an even multiple of 8 on, as chunks begin
    sweep = Sweep(RULES["mul_scalar"], [[room[:5000], room[:0]]])
    tail_of(sweep.table.host, numel, 5000)
    sweep.run({"scalar": 2.0})
    assert (room[-5000:] == 6).all()
    assert (room[:10_000] == 0).all()


# ---- the language of rules ----


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_the_language(name: str, dtype: torch.dtype) -> None:
    rule, in_torch, roundings = PARTS[name]
    inputs = special_inputs(rule, dtype)
    want = in_torch(*inputs)
    lists = [[t.clone()] for t in inputs]
    multi_tensor_apply(rule, lists)
    for j, expect in zip(rule.writes, want, strict=True):
        assert same_values(lists[j][0], expect, roundings), f"{rule.inputs[j]}: {lists[j][0]} is not {expect}"
    for value, expect in zip(rule.reference(*inputs), want, strict=True):
        assert same_values(value.to(dtype).expand_as(expect).contiguous(), expect, roundings)


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_locals_and_results_that_read_each_other(flag: float) -> None:
    a, b = torch.randn(100, dtype=F64), torch.randn(100, dtype=F64)
    want = steps_in_torch(a, b, 0.3, flag)
    multi_tensor_apply(steps, [[a], [b]], {"rate": 0.3, "flag": flag})
    torch.testing.assert_close(a, want[0], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(b, want[1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_may_take_the_value_of_a_hyperparameter(dtype: torch.dtype) -> None:
    a, b = torch.arange(5, dtype=dtype), torch.arange(5, dtype=dtype)
    want = (torch.full_like(a, 1.5), 3 * b)
    for got, expect in zip(filled.reference(a, b, value=3.0), want, strict=True):
        assert torch.equal(got, expect)
        assert got.dtype is dtype
    multi_tensor_apply(filled, [[a], [b]], {"value": 3.0})
    assert torch.equal(a, want[0])
    assert torch.equal(b, want[1])
    assert filled(7.0, 2.0, value=3.0) == (1.5, 6.0)


def test_many_hyperparameters() -> None:
    a, b = torch.randn(3000, dtype=F64), torch.randn(3000, dtype=F64)
    (want,) = many.reference(a, b, **MANY)
    multi_tensor_apply(many, [[a], [b]], MANY)
    torch.testing.assert_close(a, want, rtol=1e-13, atol=1e-13)


def test_two_lists_change_places() -> None:
    a, b = torch.arange(5.0), -torch.arange(5.0)
    multi_tensor_apply(swap, [[a], [b]])
    assert torch.equal(a, -torch.arange(5.0))
    assert torch.equal(b, torch.arange(5.0))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_float_is_read_exactly(dtype: torch.dtype) -> None:
    source = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)
    target = torch.zeros(1 << 16)
    multi_tensor_apply(copied, [[source], [target]])
    assert same_values(target, source.float())


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("wide", [F32, F64], ids=str)
def test_floats_are_rounded_to_16_bits_as_torch_does(dtype: torch.dtype, wide: torch.dtype) -> None:
    halves = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype).float()
    ordered = halves[halves.isfinite()].sort().values
    ties = (ordered[1:] + ordered[:-1]) / 2  # exact: every tie between neighbours, and a hair to either side
    hairs = [torch.nextafter(ties, torch.tensor(s * float("inf"))) for s in (1, -1)]
    beyond = torch.tensor(
        [65519.99, 65520.0, 65536.0, 1e30, -65520.0, 3.4e38, float("inf"), float("nan"), 6e-8, 2.9e-8]
    )
    random = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint32).view(np.float32))
    values = torch.cat([halves, ties, *hairs, beyond, random]).to(wide)
    target = torch.zeros(len(values), dtype=dtype)
    multi_tensor_apply(copied, [[values], [target]])
    assert same_values(target.float(), values.to(dtype).float())
