"""Update rules: what is hoisted, what the generated source looks like, and what a rule says of itself."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from rules_under_test import carrying, carrying_in_python
from support import BETAS, scalars_for

from pagedopt import PagedLion, multi_tensor_apply
from pagedopt.rules import RULES, Rule, rule


def test_expressions_of_hyperparameters_are_computed_once_in_double() -> None:
    adamw = RULES["adamw"]
    scalars = scalars_for(adamw, lr=1e-3, beta2=0.999, weight_decay=0.1)
    uniforms = adamw.uniforms(scalars)
    assert all(type(u) is float for u in uniforms)
    assert 1 - 0.999 in uniforms  # and not float32(1) - float32(0.999), which is 3e-5 off
    assert 1e-3 * 0.1 in uniforms
    assert 1e-3 / (1 - BETAS[0] ** scalars["step"]) in uniforms


def test_an_expression_used_twice_travels_once() -> None:
    @rule
    def twice(param, *, lr):  # type: ignore[no-untyped-def]
        param = param * (1 - lr) + (1 - lr)
        return param - lr

    assert twice.uniforms({"lr": 0.25}) == [0.75, 0.25]


def test_statements_of_hyperparameters_run_on_the_host() -> None:
    @rule
    def scheduled(param, *, lr, step):  # type: ignore[no-untyped-def]
        """A warm-up written in the rule."""
        warm = min(1.0, step / 10)
        rate = lr * warm**0.5 if step % 2 else -lr
        param -= rate * param
        return param

    assert scheduled.uniforms({"lr": 0.3, "step": 5}) == [0.3 * 0.5**0.5]
    assert scheduled.uniforms({"lr": 0.3, "step": 4}) == [-0.3]


def test_a_kernel_compares_hyperparameters_with_zero_itself() -> None:
    """It has the number anyway, and one as small as float32 can be has its sign still."""

    @rule
    def signed(param, *, lr):  # type: ignore[no-untyped-def]
        param = param + lr
        param = 1 if lr > 0 else param
        param = 2 if lr < 0 else param
        return param if lr != 0 else 7

    assert signed.uniforms({"lr": 0.5}) == [0.5]
    for lr, want in ((1e-45, 1), (-1e-45, 2), (0.0, 7), (-0.0, 7), (math.inf, 1)):
        x = torch.zeros(3)
        multi_tensor_apply(signed, [[x]], {"lr": lr})
        assert x.tolist() == [want] * 3


def test_other_comparisons_of_hyperparameters_are_made_on_the_host() -> None:
    @rule
    def bounded(param, *, lr):  # type: ignore[no-untyped-def]
        param = param * lr if lr > 1e-9 else param
        return param if lr < 1 else -param

    assert bounded.uniforms({"lr": 0.5}) == [0.5, 1.0, 1.0]


def test_adamw_takes_few_numbers() -> None:
    """A kernel reads all of them for each chunk."""
    assert RULES["adamw"].uniform_count <= 9


def test_defaults_of_a_rule_are_taken_and_missing_scalars_named() -> None:
    whole = {"lr": 0.5, "weight_decay": 0, "maximize": False}
    assert RULES["sgd"].uniforms({"lr": 0.5}) == RULES["sgd"].uniforms(whole)
    with pytest.raises(TypeError, match=r"missing \['lr'\], unknown \['rate'\]"):
        RULES["sgd"].uniforms({"rate": 0.5})


# ---- what a rule says of itself ----


def test_the_out_of_place_variant_writes_lists_behind_the_inputs() -> None:
    variant = RULES["sgd_momentum"].out_of_place
    assert variant.inputs == ("param", "grad", "momentum_buffer", "out_param", "out_momentum_buffer")
    assert (variant.writes, variant.name) == ((3, 4), "sgd_momentum_out")
    assert RULES["sgd_momentum"].writes == (0, 2)


def test_a_list_that_is_never_read_is_not_loaded() -> None:
    @rule
    def fresh(param, grad):  # type: ignore[no-untyped-def]
        param = 2 * grad
        return param

    assert "reads = 0x2, writes = 0x1" in fresh.cuda_source()
    assert "in[0]" not in fresh.cuda_source()


@pytest.mark.parametrize("name", ["adamw", "square_root"])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["deepcopy", "pickle"])
def test_a_rule_survives_copies(name: str, again: Callable[[Rule], Rule]) -> None:
    for original in (RULES[name], RULES[name].out_of_place):
        twin = again(original)
        assert (twin.name, twin.inputs, twin.writes) == (original.name, original.inputs, original.writes)
        assert twin.cuda_source() == original.cuda_source()


# --- lion's defaults are those of its paper ---------------------------------------------------------------------------


def test_defaults() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    defaults = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    assert PagedLion([p]).param_groups[0].items() >= defaults.items()


# --- hyperparameters that a rule returns: their new values, and what it computes before and behind the change ---------


SCALARS = {"scale": 0.7, "rate": 0.3, "count": 5.0}


def test_new_values_are_computed_in_double() -> None:
    uniforms = carrying.uniforms(SCALARS)
    assert list(carrying.carried) == ["scale", "count"]
    assert [uniforms[i] for i in carrying.carried.values()] == [0.7 / 2 * 0.3, 3.0]
    assert 0.7 * 0.3 in uniforms
    assert carrying.writes == (0, 1)


@pytest.mark.parametrize("count", [3, 20])
def test_those_of_many_sets_have_the_same_bits(count: int) -> None:
    scales = np.linspace(0.1, 2, count)
    sets = carrying.uniform_sets({**SCALARS, "scale": scales})
    assert sets[:, carrying.carried["scale"]].tolist() == [scale / 2 * 0.3 for scale in scales.tolist()]
    assert sets.tolist() == [carrying.uniforms({**SCALARS, "scale": scale}) for scale in scales.tolist()]


def test_tensors_take_old_and_new_values_as_they_are_written() -> None:
    a, b = torch.randn(2, 50, dtype=torch.float64)
    want = carrying_in_python(a, b, **SCALARS)
    torch.testing.assert_close(carrying.reference(a, b, **SCALARS), want[:2], rtol=1e-15, atol=1e-15)
    first = carrying(float(a[0]), float(b[0]), **SCALARS)
    assert (first[1], first[3]) == want[2:]
    multi_tensor_apply(carrying, [[a], [b]], SCALARS)
    torch.testing.assert_close((a, b), want[:2], rtol=1e-14, atol=1e-14)
