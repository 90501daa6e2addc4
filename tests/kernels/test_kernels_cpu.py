"""The Numba kernels against the float64 reference, through multi_tensor_apply and Sweep on CPU tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from children import python
from gpu_support import DEVICES
from often import MARKS
from rules_under_test import copied, same_values
from support import BF16, DTYPES, F16, F32, F64, SIZES, assert_updated, clone, lists_for, same_bits, scalars_for

from pagedopt import Sweep, multi_tensor_apply
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import Geometry

ADAMW, FLOATS = RULES["adamw"], (F32,) * 4


def mixes(rule: Rule) -> Iterator[tuple[torch.dtype, ...]]:
    """All lists alike, and for rules with state the mixes that training uses: (param, grad, state…)."""
    for dtype in DTYPES:
        yield (dtype,) * len(rule.inputs)
    state = len(rule.inputs) - 2
    if rule.inputs[0] == "param":
        yield (BF16, BF16, *[F32] * state)
        yield (F32, F16, *[BF16] * state)
        yield (F16, F64, *[F32] * state)


#: Of the rules with state those that the others are made like: they are run in every mix.
IN_ALL = ("adamw", "sgd_momentum", "lion")


def cases() -> Iterator[Any]:
    """All rules in float32 and one more dtype, in turn; some in all."""
    for i, rule in enumerate(RULES.values()):
        for dtypes in mixes(rule):
            in_turn = set(dtypes) in ({F32}, {DTYPES[1:][i % 3]})
            if in_turn or rule.name in IN_ALL:
                name = f"{rule.name}-{'-'.join(str(d)[6:] for d in dtypes)}"
                yield pytest.param(rule, dtypes, id=name, marks=MARKS[in_turn or rule is ADAMW or dtypes[0] != F16])


@pytest.mark.parametrize(("rule", "dtypes"), list(cases()))
def test_kernel_is_the_reference(rule: Rule, dtypes: tuple[torch.dtype, ...]) -> None:
    before = lists_for(rule, SIZES, dtypes)
    after, scalars = clone(before), scalars_for(rule)
    multi_tensor_apply(rule, after, scalars)
    assert_updated(rule, before, after, scalars)
    for j in set(range(len(dtypes))) - set(rule.writes):
        assert all(torch.equal(a, b) for a, b in zip(before[j], after[j], strict=True)), "an input was written"


@pytest.mark.parametrize("name", RULES)
def test_out_of_place_leaves_the_inputs(name: str) -> None:
    rule, dtypes = RULES[name], (F32,) * len(RULES[name].inputs)
    before = lists_for(rule, SIZES, dtypes)
    kept, scalars = clone(before), scalars_for(rule)
    out = [[torch.full_like(t, 7.0) for t in before[j]] for j in rule.writes]
    multi_tensor_apply(rule, before, scalars, out=out)
    assert same_bits(before, kept)
    inplace = clone(kept)
    multi_tensor_apply(rule, inplace, scalars)
    for j, results in zip(rule.writes, out, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(inplace[j], results, strict=True))


def test_a_list_that_was_absent_at_first_brings_its_dtype() -> None:
    rule = RULES["sgd"]
    before = lists_for(rule, (3000, 40), (BF16, BF16))
    after = clone(before)
    sweep = Sweep(rule, [after[0], [None, None]])
    sweep.refresh(after)
    sweep.run(scalars_for(rule))
    assert_updated(rule, before, after, scalars_for(rule))
    sweep = Sweep(rule, [after[0], [None, None]])
    with pytest.raises(TypeError, match=r"grad is torch\.int32"):
        sweep.refresh([None, [torch.ones(3000).int(), None]])


@pytest.mark.parametrize("shape", [Geometry(48, 32), Geometry(4080, 512), Geometry(1 << 20, 512)], ids=str)
def test_how_the_work_is_cut_changes_no_bit(shape: Geometry) -> None:
    one, other = lists_for(ADAMW, SIZES, FLOATS), lists_for(ADAMW, SIZES, FLOATS)
    Sweep(ADAMW, one).run(scalars_for(ADAMW))
    Sweep(ADAMW, other, geometry=shape).run(scalars_for(ADAMW))
    assert same_bits(one, other)


# ---- conversions ----


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Of a dtype of 16 bits."""
    return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_float_is_read_exactly(dtype: torch.dtype, device: str) -> None:
    source = every_value(dtype)
    target = torch.zeros(1 << 16, device=device)
    multi_tensor_apply(copied, [[source.to(device)], [target]])
    assert same_values(target.cpu(), source.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("wide", [F32, F64], ids=str)
def test_floats_are_rounded_to_16_bits_as_torch_does(dtype: torch.dtype, wide: torch.dtype, device: str) -> None:
    halves = every_value(dtype).float()
    ordered = halves[halves.isfinite()].sort().values
    ties = (ordered[1:] + ordered[:-1]) / 2  # exact: every tie between neighbours, and a hair to either side
    hairs = [torch.nextafter(ties, torch.tensor(end)) for end in (math.inf, -math.inf)]
    beyond = torch.tensor([65519.99, 65520.0, 65536.0, 1e30, -65520.0, 3.4e38, math.inf, math.nan, 6e-8, 2.9e-8])
    random = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint32).view(np.float32))
    values = torch.cat([halves, ties, *hairs, beyond, random]).to(wide)
    target = torch.zeros(len(values), dtype=dtype, device=device)
    multi_tensor_apply(copied, [[values.to(device)], [target]])
    assert same_values(target.cpu().float(), values.to(dtype).float())


WITHOUT_JIT = """
import json, sys, warnings
import torch

told, values = [], []
warnings.showwarning = lambda message, *_: told.append(str(message))
from pagedopt import PagedSGD
if sys.argv[1:]:
    from pagedopt.kernels import pointer
for kind in (PagedSGD, torch.optim.SGD):
    p = torch.nn.Parameter(torch.tensor([3.0, -8.0], dtype=torch.bfloat16))
    optimizer = kind([p], lr=0.5, momentum=0.5)
    for _ in range(3):
        p.grad = torch.tensor([1.0, 0.25], dtype=torch.bfloat16)
        optimizer.step()
    values.append(p.tolist())
print(json.dumps([values, [text for text in told if "NUMBA" in text]]))
"""


@pytest.mark.parametrize("first", [(), pytest.param(("pointer",), marks=pytest.mark.long)])
def test_kernels_are_compiled_where_numba_is_told_not_to_and_a_warning_says_so(first: tuple[str, ...]) -> None:
    said = python("-c", WITHOUT_JIT, *first, fresh=True, NUMBA_DISABLE_JIT="1")
    (ours, theirs), told = json.loads(said)
    assert ours == theirs
    assert len(told) == 1
    assert "NUMBA_DISABLE_JIT is set, without effect from here on" in told[0]
