"""The same bits on a CPU and on a GPU: one rule, IEEE operations in one order, nothing fused behind our back.

Infinities and denormals are compared, too; of a NaN only that it is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu_support import NEEDED
from prologue_rows import Launch, Rows, check_runs, mixed_rows
from prologue_rules import SUBJECTS, common_sets
from rules_to_the_bit import CASES, SIZES, STORED, assert_same_bits, name_of, sets_in, special_lists, spoilt
from rules_under_test import same_values

from pagedopt import Sweep
from pagedopt.kernels import cuda
from pagedopt.rules import RULES, Rule
from pagedopt.system import internals
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


# --- hyperparameters computed by the device: the host's after rounding to float32, and read again at each replay ------


#: Of so many sets one may round to another float32: a device's ``pow`` is not the C library's.
ONE_IN = 1000


def launch_of(subject: Rule) -> Launch:
    """Launches on the current stream."""
    index = torch.cuda.current_device()
    kernel = cuda.prologue_kernel(subject, index)
    return lambda argument, rows: kernel(argument, rows, cuda.Stream(internals.current_stream(index)))


def sets_of_adamw(count: int) -> list[dict[str, float]]:
    """Random hyperparameters, near their ends, too."""
    generator = np.random.default_rng(11)
    columns = {
        "lr": 10 ** generator.uniform(-6, 0, count),
        "beta1": 1 - 10 ** generator.uniform(-3, -0.2, count),
        "beta2": 1 - 10 ** generator.uniform(-5, -0.5, count),
        "eps": 10 ** generator.uniform(-12, -3, count),
        "weight_decay": np.where(generator.random(count) < 0.2, 0, generator.uniform(0, 0.3, count)),
        "step": np.ceil(10 ** generator.uniform(0, 5, count)),
        "maximize": generator.integers(0, 2, count).astype(float),
    }
    assert tuple(columns) == RULES["adamw"].scalars
    return [dict(zip(columns, values, strict=True)) for values in np.column_stack([*columns.values()]).tolist()]


def test_numbers_of_adamw_round_to_the_hosts() -> None:
    subject, sets = RULES["adamw"], sets_of_adamw(ONE_IN)
    steps = [s["step"] for s in sets]
    assert min(steps) < 5
    assert 50_000 < max(steps) <= 100_000
    single = np.zeros((len(sets), 1 + len(subject.scalars)), bool)
    single[:, 0] = True  # torch's step counts
    device = Rows(subject, sets, single, device="cuda").run(launch_of(subject))
    host = np.array([subject.uniforms(s) for s in sets])
    np.testing.assert_allclose(device, host, rtol=1e-9, atol=0)
    got, want = device.astype(np.float32), host.astype(np.float32)
    apart = got != want
    assert apart.any(axis=1).sum() <= len(sets) / ONE_IN, f"{apart.sum(axis=0)} of {len(sets)} for each number"
    assert np.array_equal(np.nextafter(want, got)[apart], got[apart]), "more than one float32 apart"


def test_means_that_are_never_corrected() -> None:
    """beta2 = 1 needs the smallest number of all as a divisor."""
    subject = RULES["adamw"]
    sets = [{**s, "beta2": 1.0} for s in common_sets(subject, 3)]
    got = Rows(subject, sets, device="cuda").run(launch_of(subject))
    host = np.array([subject.uniforms(s) for s in sets])
    assert np.isinf(host).any(axis=1).all()
    assert np.array_equal(got.astype(np.float32), host.astype(np.float32))


@pytest.mark.parametrize("name", ["smooth", "nadam", "adam_amsgrad"])
def test_other_functions_are_near(name: str) -> None:
    subject = SUBJECTS[name]
    sets = common_sets(subject, 1000)
    got = Rows(subject, sets, device="cuda").run(launch_of(subject))
    np.testing.assert_allclose(got, [subject.uniforms(s) for s in sets], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("count", [1, 128, 300])
@pytest.mark.parametrize("name", ["lion", "sgd_momentum", "carrying"])
def test_numbers_are_read_and_written_in_their_types(name: str, count: int) -> None:
    """Rules without powers: to the bit."""
    subject = SUBJECTS[name]
    check_runs(mixed_rows(subject, common_sets(subject, count), device="cuda"), launch_of(subject))
