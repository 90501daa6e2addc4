"""Hyperparameters that may be None, state that holds weights, and a second rule over parameters and state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagedopt
from pagedopt import Moment, rule

from .schedule_free import ScheduleFree, schedule_free, to_average
from .training import EVERYWHERE, gradient, parameters, train


def reference(p: torch.Tensor, number: int, steps: int, warmup: int | None) -> tuple[torch.Tensor, ...]:
    """(y, z, x) in float64, of the paper's lines: y is between z and x, the average."""
    z = x = p.detach().double()
    weights, count = 0.0, 0
    for step in range(steps):
        if (grad := gradient(p, step, number)) is None:
            continue
        count += 1
        rate = 0.05 * (min(1, count / warmup) if warmup else 1)
        weights += rate**2
        z = z - rate * grad.double()
        x = x + rate**2 / weights * (z - x)
    return 0.1 * z + 0.9 * x, z, x


@pytest.mark.parametrize("warmup", [None, 3])
@pytest.mark.parametrize(("device", "how"), EVERYWHERE)
def test_it_trains_one_point_and_evaluates_another(device: str, how: dict[str, Any], warmup: int | None) -> None:
    params = parameters(device)
    opt = ScheduleFree(params, lr=0.05, warmup=warmup, **how)
    train(opt, params, 0, 5)
    opt.switch(training=False)
    opt.switch(training=False)
    for number, (p, began) in enumerate(zip(params, parameters(device), strict=True)):
        torch.testing.assert_close(p.detach().double(), reference(began, number, 5, warmup)[2], rtol=1e-5, atol=1e-5)
    opt.switch(training=True)
    train(opt, params, 5, 10)
    for number, (p, began) in enumerate(zip(params, parameters(device), strict=True)):
        y, z, x = reference(began, number, 10, warmup)
        torch.testing.assert_close(p.detach().double(), y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(opt.state[p]["z"].double(), z, rtol=1e-5, atol=1e-5)
        assert (x - y).abs().max() > 1e-4


def test_none_is_refused_where_a_rule_does_not_say_that_it_may_be() -> None:
    with pytest.raises(TypeError, match="beta is None; give a number"):
        ScheduleFree(parameters(), beta=None)


@pytest.mark.parametrize(
    ("dtype", "state_format", "stored"),
    [(torch.bfloat16, None, torch.float32), (torch.float16, None, torch.float32), (torch.float64, None, torch.float64),
     (torch.bfloat16, "bfloat16", torch.bfloat16), (torch.bfloat16, {"z": "float64"}, torch.float64)],
)  # fmt: skip
def test_weights_are_float32_unless_a_format_is_named(
    dtype: torch.dtype, state_format: Any, stored: torch.dtype
) -> None:
    params = parameters(dtype=dtype)
    opt = ScheduleFree(params, state_format=state_format)
    train(opt, params, 0, 2)
    assert {opt.state[p]["z"].dtype for p in params} == {stored}
    said, named = (pagedopt.estimate(params, rule=schedule_free, state_format=f) for f in (state_format, stored))
    assert said.by_place == named.by_place


def test_weights_are_refused_in_8_bits_with_the_number() -> None:
    with pytest.raises(ValueError, match=r"'z' .*int8: it holds weights, .* 2.4 % apart .*=\{'z': 'float32'"):
        ScheduleFree(parameters(), state_format="int8")
    codes = torch.arange(1.0, 127) ** 3
    assert float((codes[1:] / codes[:-1]).min()) - 1 == pytest.approx(0.024, abs=1e-3)


def test_a_reason_against_8_bits_is_said() -> None:
    @rule(moments={"level": Moment(signed=False, exact="it climbs")})
    def climbing(param, grad, level, *, lr):  # type: ignore[no-untyped-def]
        level = max(level, grad)
        param = param - lr * level
        return param, level

    class Climbing(pagedopt.PagedOptimizer):
        rule = climbing

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, {"lr": 1.0}, **options)

    with pytest.raises(ValueError, match="'level' of rule 'climbing' cannot be stored in int8: it climbs; give that"):
        Climbing(parameters(), state_format="int8")


def test_a_second_rule_names_the_state_that_is_not_there() -> None:
    params = parameters()
    opt = pagedopt.PagedAdamW(params)
    train(opt, params, 0, 1)
    with pytest.raises(ValueError, match=r"rule 'to_average' takes 'z'; the state .* is 'step', 'exp_avg'"):
        opt.apply(to_average, opt.param_groups[0])
