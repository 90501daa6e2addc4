"""The two operators on a GPU: opcheck, and compiled functions with the bits of eager ones, CUDA graphs or not."""

from __future__ import annotations

import pytest
import torch
from compiled_steps import arguments, backward, ended, equal, made, operator
from gpu_support import launching
from torch import nn

from pagedopt import PagedAdamW, multi_tensor_apply, rule

pytestmark = [launching(), pytest.mark.usefixtures("nothing_compiled"), pytest.mark.filterwarnings("ignore")]


@rule
def decayed(weight, grad, *, rate, lr):  # type: ignore[no-untyped-def]
    weight = weight * (1 - rate) - lr * grad
    return weight


def lists(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(seed)
    found = [torch.randn(n, generator=generator, device="cuda") for n in (3, 1, 70_000) * 2]
    return found[:3], found[3:]


def on_the_card() -> tuple[nn.Module, PagedAdamW]:
    model, _ = made()
    model.cuda()
    return model, PagedAdamW(model.parameters(), lr=1e-2)


def test_opcheck_has_nothing_to_say() -> None:
    from pagedopt.launch.registered import multi_tensor_apply_

    weights, grads = lists()
    scalars = torch.tensor([0.1, 0.5], dtype=torch.float64)
    model, optimizer = on_the_card()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    cases = [
        (multi_tensor_apply_, (weights, grads, decayed.registered, scalars)),
        (operator(), arguments(model, optimizer)),
    ]
    for op, given in cases:
        found = torch.library.opcheck(op, given)
        assert found == dict.fromkeys(found, "SUCCESS")
        assert len(found) == 4


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_call_has_the_bits_of_an_eager_one(mode: str) -> None:
    def apply(weights: list[torch.Tensor], grads: list[torch.Tensor], scalars: torch.Tensor) -> torch.Tensor:
        multi_tensor_apply(decayed, [weights, grads], scalars)
        return weights[0] + 1

    run = torch.compile(apply, fullgraph=True, mode=mode)
    for i in range(6):
        (got, grads), (want, _) = lists(i), lists(i)
        scalars = torch.tensor([0.01 * i, 0.5], dtype=torch.float64)
        after = run(got, grads, scalars).clone()
        assert torch.equal(after, apply(want, grads, scalars))
        assert equal(got, want)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("in_between", [False, True], ids=["alone", "between other operators"])
def test_a_compiled_step_has_the_bits_of_an_eager_one(mode: str, in_between: bool) -> None:
    results = []
    for compiled in (True, False):
        model, optimizer = on_the_card()
        first = next(model.parameters())

        def step(optimizer: PagedAdamW = optimizer, first: torch.Tensor = first) -> torch.Tensor | None:
            if not in_between:
                optimizer.step()
                return None
            with torch.no_grad():
                first.mul_(2)
                optimizer.step()
                return first + 1

        run = torch.compile(step, fullgraph=True, mode=mode) if compiled else step
        for i in range(6):
            optimizer.zero_grad()
            for j, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 0.1 * (i + j + 1))
            run()
        assert not any(group.get("capturable") for group in optimizer.param_groups)
        results.append(ended(model, optimizer))
    assert equal(*results)


def test_a_step_whose_state_is_away_is_compiled() -> None:
    results = []
    for compiled in (True, False):
        params = [nn.Parameter(torch.ones(1 << 20, device="cuda")) for _ in range(3)]
        optimizer = PagedAdamW(params, lr=1e-2, device_budget=0)
        run = torch.compile(lambda o=optimizer: o.step(), fullgraph=True) if compiled else optimizer.step
        for i in range(3):
            for p in params:
                p.grad = torch.full_like(p, i + 1.0)
            run()
        results.append([p.detach().clone() for p in params])
    assert equal(*results)


def test_the_model_s_own_backward_feeds_a_compiled_step() -> None:
    model, optimizer = on_the_card()
    run = torch.compile(lambda: optimizer.step(), fullgraph=True)
    before = ended(model, optimizer)
    for i in range(3):
        optimizer.zero_grad()
        with torch.device("cuda"):
            backward(model, i)
        run()
    assert not any(torch.equal(a, b) for a, b in zip(ended(model, optimizer), before, strict=False))
