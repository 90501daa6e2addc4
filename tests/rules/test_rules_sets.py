"""Many sets of hyperparameters at once: the bits, and the exceptions, of one set after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import scalars_for

from pagedopt import PagedAdamW
from pagedopt.rules import RULES, Rule, rule, sign, sqrt

Sets = list[list[float]]


def one_by_one(subject: Rule, scalars: Mapping[str, Any]) -> Sets | type[BaseException]:
    """What plain numbers give, or the exception that the first set with one raises."""
    count = next(len(v) for v in scalars.values() if isinstance(v, np.ndarray))
    try:
        return [
            subject.uniforms({name: float(v[i]) if isinstance(v, np.ndarray) else v for name, v in scalars.items()})
            for i in range(count)
        ]
    except Exception as error:
        return type(error)


def assert_same_bits(subject: Rule, scalars: Mapping[str, Any]) -> None:
    want = one_by_one(subject, scalars)
    if isinstance(want, type):
        with pytest.raises(want):
            subject.uniform_sets(scalars)
        return
    got = subject.uniform_sets(scalars)
    assert np.array_equal(got.view(np.int64), np.array(want).reshape(got.shape).view(np.int64))


STEPS = st.one_of(
    st.integers(1, 400).map(float), st.floats(-2, 2**33), st.sampled_from([0.0, math.nan, math.inf, -1.0])
)
BETA = st.one_of(st.floats(0.5, 1.0), st.sampled_from([0.0, 1.0, 1.5, -0.5, math.nan, math.inf, 0.999]))


@given(steps=st.lists(STEPS, min_size=8, max_size=40), beta1=BETA, beta2=BETA)
@settings(deadline=None, max_examples=300)
def test_adamw_to_the_bit(steps: list[float], beta1: float, beta2: float) -> None:
    subject = RULES["adamw"]
    assert_same_bits(subject, {**scalars_for(subject, beta1=beta1, beta2=beta2), "step": np.array(steps)})


def test_many_counts_to_the_bit_without_asking_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's ``power`` would fail this, and so would a fall back to one set after the other."""
    subject, steps = RULES["adamw_amsgrad"], np.arange(1.0, 20_000.0)
    scalars = {**scalars_for(subject, beta1=0.9, beta2=0.999), "step": steps}
    want = one_by_one(subject, scalars)
    monkeypatch.setattr(Rule, "uniforms", lambda *_: pytest.fail("asked one by one"))
    assert np.array_equal(subject.uniform_sets(scalars), np.array(want))


@rule
def schedule(param, *, lr, warm, step):  # type: ignore[no-untyped-def]
    """Every construct of the host's part."""
    share = min(1.0, step / warm) if warm > 0 and not step < 0 else max(step, 0.5)
    cycle = step % 7 // 2 + (step > 3) + (0 < step <= 5) - (-(step != 2))
    fall = 1 / (1 + abs(step - warm)) if step > warm or step == 1 else sqrt(abs(lr))
    late = True if step > 100 else 0
    both = 2 if (step > 2 and warm) or lr else 3
    rate = lr * share * sign(cycle - 3) * fall**1.5 + 2**3 * late
    return (param if (step and warm) or lr else 2 * param) - rate * cycle - share * late * both


@given(steps=st.lists(STEPS, min_size=8, max_size=20), warm=st.floats(-5, 50), lr=st.floats(-1, 1))
@settings(deadline=None, max_examples=300)
def test_every_construct_to_the_bit(steps: list[float], warm: float, lr: float) -> None:
    assert_same_bits(schedule, {"lr": lr, "warm": warm, "step": np.array(steps)})
    assert_same_bits(schedule, {"lr": lr, "warm": np.array(steps), "step": warm})


@pytest.mark.parametrize("count", [1, 7, 8])
def test_other_hyperparameters_may_differ_too(count: int) -> None:
    subject = RULES["sgd_momentum"]
    lr, step = np.linspace(0.1, 1, count), np.arange(1.0, count + 1)
    assert_same_bits(subject, {**scalars_for(subject), "lr": lr, "step": step})


ERRORS = [
    ({"beta2": 1.5}, 3.0, RuntimeError, "'adamw': .* has the root of a negative number.*1.5"),
    ({"beta1": 1.0}, 3.0, ZeroDivisionError, "division by zero"),
    ({}, 0.0, ZeroDivisionError, "division by zero"),
]


@pytest.mark.parametrize(("changes", "step", "error", "text"), ERRORS)
@pytest.mark.parametrize("sets", [1, 4, 9])
def test_errors_are_those_of_one_set(
    sets: int, changes: dict[str, float], step: float, error: type[Exception], text: str
) -> None:
    subject = RULES["adamw"]
    scalars = scalars_for(subject, **changes)
    with pytest.raises(error, match=text):
        subject.uniforms({**scalars, "step": step})
    with pytest.raises(error, match=text):
        subject.uniform_sets({**scalars, "step": np.full(sets, step)})


def test_a_second_bias_correction_of_zero_is_infinite() -> None:
    subject = RULES["adamw"]
    scalars = scalars_for(subject, beta2=1.0)
    assert math.inf in subject.uniforms(scalars)
    assert np.isinf(subject.uniform_sets({**scalars, "step": np.arange(1.0, 20)})).any(axis=1).all()


def test_what_is_missing_or_unknown_is_named() -> None:
    subject = RULES["adamw"]
    scalars = {**scalars_for(subject), "step": np.arange(1.0, 20)}
    with pytest.raises(TypeError, match=r"unknown \['rate'\]"):
        subject.uniform_sets({**scalars, "rate": 1.0})
    del scalars["lr"]
    with pytest.raises(TypeError, match=r"missing \['lr'\]"):
        subject.uniform_sets(scalars)


@pytest.mark.parametrize("groups", [1, 2])
def test_parameters_of_many_step_counts_are_updated_as_torch_does(groups: int) -> None:
    """Twenty counts in each group and one alone, in one launch."""
    made = []
    for make in (PagedAdamW, torch.optim.AdamW):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 11, dtype=torch.float64) + i) for i in range(41)]
        parts = [params] if groups == 1 else [params[:20], params[20:]]
        optimizer = make([{"params": part, "lr": 0.1 * (i + 1)} for i, part in enumerate(parts)], betas=(0.8, 0.95))
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = torch.sin(p.detach() * (step + 2) + i)
            optimizer.step()
            if step == 0:
                for i, p in enumerate(params):
                    optimizer.state[p]["step"].fill_(i + 1 if i < 40 else 3)
        made.append(params)
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("numerator", [math.inf, -math.inf, math.nan, 0.0, 1.0])
@pytest.mark.parametrize("sets", [3, 40])
def test_a_division_by_zero_raises_whatever_is_divided(numerator: float, sets: int) -> None:
    """By IEEE 754 inf / 0 and nan / 0 raise no flag."""

    @rule
    def dividing(param, grad, *, lr, step, cap):  # type: ignore[no-untyped-def]
        return param - grad * min(lr, cap / (step - 8))

    steps = np.arange(1.0, sets + 1)
    assert_same_bits(dividing, {"lr": 0.1, "step": steps, "cap": numerator})
    assert_same_bits(dividing, {"lr": 0.1, "step": steps + 8, "cap": np.full(sets, numerator)})
