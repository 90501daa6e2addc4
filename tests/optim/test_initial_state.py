"""State that starts at another value than zero, through an optimizer of a user's own: Adagrad, beside torch's."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from optim_support import bits, same, step_on

import pagedopt
from pagedopt import PagedOptimizer
from pagedopt.rules import sqrt
from tests.world import groups_of, numbers, parameters, steps

OPTIONS: dict[str, Any] = {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-3}


@pagedopt.rule
def adagrad(param, grad, sum, *, lr, lr_decay, weight_decay, eps, step):  # type: ignore[no-untyped-def]
    """Duchi et al. 2011, in the order of operations of torch/optim/adagrad.py."""
    grad = grad + weight_decay * param if weight_decay != 0 else grad
    sum = sum + grad * grad
    param = param - lr / (1 + (step - 1) * lr_decay) * grad / (sqrt(sum) + eps)
    return param, sum


class Adagrad(PagedOptimizer):
    """Its accumulator starts with the group's value."""

    rule = adagrad
    initial: ClassVar = {"sum": "initial_accumulator_value"}

    def __init__(self, params: Any, initial_accumulator_value: float = 0.0, **options: Any) -> None:
        ours = {name: options.pop(name) for name in OPTIONS}
        super().__init__(params, {**ours, "initial_accumulator_value": initial_accumulator_value}, **options)


class FromTwo(Adagrad):
    """It starts with a number, whatever the group says."""

    initial: ClassVar = {"sum": 2.0}
    extra_defaults = ("initial_accumulator_value",)


PLACES: list[dict[str, Any]] = [{}, {"device_budget": 0}, {"device_budget": 90_000}, {"state_format": "bfloat16"}]


def groups(params: list[torch.nn.Parameter], start: float) -> list[dict[str, Any]]:
    first, second = groups_of(params)
    return [first, {**second, "initial_accumulator_value": start}]


@pytest.mark.parametrize("how", PLACES, ids=str)
@pytest.mark.parametrize("first", [0.0, 0.3])
def test_adagrad_is_torchs(first: float, how: dict[str, Any]) -> None:
    ours, theirs, sums = [], [], []
    for made, make in ((ours, Adagrad), (theirs, torch.optim.Adagrad)):
        params, late = parameters(), parameters()[1]
        options = how if make is Adagrad else {}
        optimizer = make(groups(params, 0.7), initial_accumulator_value=first, **OPTIONS, **options)
        if make is torch.optim.Adagrad:  # which makes all its state here, with the first value
            for p in optimizer.param_groups[1]["params"]:
                optimizer.state[p]["sum"].fill_(0.7)
        steps(optimizer, params, 2)
        optimizer.add_param_group({"params": [late], "initial_accumulator_value": 0.9})
        if make is torch.optim.Adagrad:
            optimizer.state[late] = {"step": torch.tensor(0.0), "sum": torch.full_like(late, 0.9)}
        steps(optimizer, [*params, late], 2, first=2)
        made += [*params, late]
        sums.append([optimizer.state[p]["sum"].float() for p in made])
    bound = {"rtol": 0.02, "atol": 1e-3} if "state_format" in how else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close([*ours, *sums[0]], [*theirs, *sums[1]], **bound)


def test_a_number_counts_for_all_groups_and_a_copy_goes_on() -> None:
    params = parameters()
    optimizer = FromTwo(groups(params, 0.7), device_budget=0, **OPTIONS)
    optimizer.param_groups[0]["weight_decay"] = optimizer.param_groups[1]["weight_decay"] = 0.0
    step_on(optimizer, 0)
    assert all((optimizer.state[p]["sum"] == 2.0).all() for p in params)
    params[0].grad = numbers(params[0].shape, 5)
    optimizer.step()
    twin, others = copy.deepcopy((optimizer, params))
    fresh = FromTwo(groups(others, 0.7), **OPTIONS)
    fresh.load_state_dict(optimizer.state_dict())
    for other in (twin, fresh):
        assert same(bits(params, optimizer), bits(others, other))
