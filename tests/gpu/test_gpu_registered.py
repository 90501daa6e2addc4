"""Compiled functions on a GPU, CUDA graphs or not: the operator and opcheck, steps, and the bits of eager ones."""

from __future__ import annotations

import pytest
import torch
from gpu_support import launching

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


def test_opcheck_has_nothing_to_say() -> None:
    from pagedopt.launch.registered import multi_tensor_apply_

    scalars = torch.tensor([0.1, 0.5], dtype=torch.float64)
    found = torch.library.opcheck(multi_tensor_apply_, (*lists(), decayed.registered, scalars))
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
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("budget", [None, 0], ids=["resident", "away"])
def test_a_step_between_other_operators_has_the_bits_of_an_eager_one(mode: str, budget: int | None) -> None:
    """Dynamo may read groups of parameters that have no state yet, and still sets no ``capturable`` in them."""
    results = []
    for compiled in (True, False):
        params = [torch.nn.Parameter(torch.ones(n, device="cuda")) for n in (3, 1, 1 << 20)]
        optimizer = PagedAdamW(params, lr=1e-2, device_budget=budget)

        def step(optimizer: PagedAdamW = optimizer, first: torch.Tensor = params[0]) -> torch.Tensor:
            optimizer.param_groups[0]["lr"] *= 0.9
            with torch.no_grad():
                first.mul_(2)
                optimizer.step()
                return first + 1

        run = torch.compile(step, mode=mode) if compiled else step
        after = []
        for i in range(6):
            for j, p in enumerate(params):
                p.grad = torch.full_like(p, 0.1 * (i + j + 1))
            after.append(run().clone())
        assert optimizer.param_groups[0]["capturable"] is False
        state = [t for p in params for t in optimizer.state[p].values()]
        results.append([t.detach().clone() for t in (*params, *state, *after)])
    assert all(map(torch.equal, *results))
