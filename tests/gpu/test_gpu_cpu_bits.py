"""The same bits on a CPU and on a GPU: one rule, IEEE operations in one order, nothing fused behind our back.

Infinities and denormals are compared, too; of a NaN only that it is one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from rules_to_the_bit import CASES, SIZES, STORED, assert_same_bits, name_of, sets_in, special_lists, spoilt
from rules_under_test import same_values

from pagedopt import Sweep
from pagedopt.rules import Rule
from tests.specs import CASES as OPTIMIZERS

pytestmark = NEEDED

SHAPES = ((), (3,), (64, 65), (100_003,))
#: Parameters of 16 bits.
SIXTEEN: dict[str, dict[str, Any]] = {
    "bfloat16 at random": {"dtype": torch.bfloat16, "param_rounding": "stochastic"},
    "float16 at random": {"dtype": torch.float16, "param_rounding": "stochastic"},
    "bfloat16+8, int8": {"dtype": torch.bfloat16, "param_format": "bfloat16+8", "state_format": "int8"},
    "bfloat16+16": {"dtype": torch.bfloat16, "param_format": "bfloat16+16"},
}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_rules_on_cpu_and_gpu_agree(case: tuple[Rule, str]) -> None:
    rule, stored = case
    before, here = (special_lists(rule, stored, (*SIZES, 100_003)) for _ in range(2))
    there = [[t.cuda() for t in tensors] for tensors in here]
    for step in (1, 2, 3):
        for lists in (here, there):
            sweep = Sweep(rule, lists, sets=3)
            sweep.table.host.set_sets([i % 3 for i in range(len(lists[0]))])
            sweep.run([rule.uniforms(scalars) for scalars in sets_in(rule, step)])
    assert_same_bits(rule, before, there, here)


@pytest.mark.parametrize("stored", [*STORED, *SIXTEEN])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_cpu_and_gpu_agree(name: str, stored: str) -> None:
    """Parameters and state after each of twenty steps, with special values among the gradients."""
    options, case = {**SIXTEEN.get(stored, {})}, OPTIMIZERS[name]
    dtype, of_state = STORED[stored] if stored in STORED else (options.pop("dtype"), None)
    options.setdefault("state_format", None if of_state is dtype else of_state)
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    runs = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(value.to(device, copy=True)) for value in start]
        try:
            optimizer = case.make(False, [{"params": params}], **options)
        except ValueError as error:
            if "cannot be stored in int8" not in str(error):
                raise
            pytest.skip("state that int8 cannot store")
        runs.append((device, params, optimizer))
    for step in range(20):
        grads = [spoilt(torch.randn(shape, generator=generator).to(dtype), generator) for shape in SHAPES]
        for device, params, optimizer in runs:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.to(device, copy=True)
            optimizer.step()
        (_, here, ours), (_, there, others) = runs
        for a, b in zip(here, there, strict=True):
            assert same_values(b.detach().cpu(), a.detach()), f"parameter after step {step + 1}"
            if "param_format" in options:
                assert same_values(others.master(b).cpu(), ours.master(a)), f"master after step {step + 1}"
            assert ours.state[a].keys() == others.state[b].keys()
            for key, value in ours.state[a].items():
                assert same_values(others.state[b][key].cpu(), value), f"{key} after step {step + 1}"
    last = here[-1].detach()
    assert (last.isfinite() & (last != start[-1])).double().mean() > 0.1, "few numbers to compare"
