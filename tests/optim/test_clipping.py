"""Clipping inside of the step: beside ``clip_grad_norm_`` and a step, and beside float64."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from clipped import ends, equal, give, params_of
from support import BF16, F16, F64

from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD

CLASSES = [
    (PagedAdamW, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.2}),
    (PagedAdamW, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.2, "amsgrad": True}),
    (PagedSGD, torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1}),
    (PagedSGD, torch.optim.SGD, {"lr": 0.03}),
]


@pytest.mark.parametrize("size", [1e-4, 3.0], ids=["below the norm", "above it"])
@pytest.mark.parametrize(("ours", "theirs", "numbers"), CLASSES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_clipped_step_is_that_of_torch(ours: Any, theirs: Any, numbers: dict[str, Any], size: float) -> None:
    mine, other = params_of(), params_of()
    a, b = ours(mine, **numbers, max_grad_norm=2.0), theirs(other, **numbers)
    for seed in range(4):
        give(mine, seed, size)
        give(other, seed, size)
        a.step()
        norm = torch.nn.utils.clip_grad_norm_(other, 2.0)
        b.step()
        torch.testing.assert_close(a.grad_norm, norm.double(), rtol=1e-6, atol=0)
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=2e-6)


def norm_of(grads: Iterable[torch.Tensor]) -> float:
    """The oracle: exact sums of squares."""
    flat = torch.cat([torch.view_as_real(g).flatten() if g.is_complex() else g.flatten().double() for g in grads])
    return math.sqrt(math.fsum((flat.double() * flat.double()).tolist()))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_in_16_bits_it_is_nearer_to_float64_than_torch(dtype: torch.dtype) -> None:
    """The first step of SGD with momentum stores the clipped gradient."""
    mine, other = params_of(dtype=dtype), params_of(dtype=dtype)
    a, b = PagedSGD(mine, lr=0.5, momentum=0.9, max_grad_norm=3.0), torch.optim.SGD(other, lr=0.5, momentum=0.9)
    give(mine, 0)
    give(other, 0)
    norm = norm_of(p.grad for p in mine)
    exact = [p.grad.double() * (3.0 / (norm + 1e-6)) for p in mine]
    a.step()
    torch.nn.utils.clip_grad_norm_(other, 3.0)
    b.step()
    assert a.grad_norm.item() == pytest.approx(norm, rel=1e-14)
    off = [
        sum((o.state[p]["momentum_buffer"].double() - e).abs().sum() for p, e in zip(params, exact, strict=True))
        for o, params in ((a, mine), (b, other))
    ]
    assert off[0] < off[1]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_what_it_does_in_torch(value: float) -> None:
    """Infinity makes of other gradients 0 and of itself NaN; NaN makes NaN of all."""
    mine, other = params_of((30, 5)), params_of((30, 5))
    a, b = PagedSGD(mine, lr=0.1, max_grad_norm=1.0), torch.optim.SGD(other, lr=0.1)
    for params in (mine, other):
        give(params, 0)
        params[0].grad[7] = value
    a.step()
    norm = torch.nn.utils.clip_grad_norm_(other, 1.0)
    b.step()
    torch.testing.assert_close(a.grad_norm, norm.double(), equal_nan=True)
    for p, q in zip(mine, other, strict=True):
        assert torch.equal(p.isnan(), q.isnan())
        torch.testing.assert_close(p, q, equal_nan=True, rtol=0, atol=0)


def test_squares_beyond_float32_are_added() -> None:
    params = params_of((5, 9))
    for p in params:
        p.grad = torch.full_like(p, 1e25)
    optimizer = PagedSGD(params, lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(1e25 * math.sqrt(14))


def test_gradients_are_not_written() -> None:
    params = params_of()
    give(params, 1, 50.0)
    before = [p.grad.clone() for p in params]
    PagedAdamW(params, max_grad_norm=0.1).step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))


def clipped_run(steps: int = 3, **options: Any) -> list[torch.Tensor]:
    params = params_of()
    optimizer = PagedAdamW(params, lr=0.03, max_grad_norm=2.0, **options)
    norms = []
    for seed in range(steps):
        give(params, seed)
        if seed == 1:
            params[1].grad = None
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return [*ends(params, optimizer), *norms]


@pytest.mark.parametrize(
    "options",
    [{"device_budget": 0}, {"device_budget": "50%"}, {"placement": "host"}, {"preallocate": True}, {"blocks": 1}],
    ids=str,
)
def test_no_option_changes_a_bit(options: dict[str, Any]) -> None:
    assert equal(clipped_run(**options), clipped_run())


@pytest.mark.parametrize("threads", [1, 2])
def test_no_number_of_threads_changes_a_bit(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        params = params_of((300_000, 70_000))
        give(params, 3)
        optimizer = PagedAdamW(params, lr=0.1, max_grad_norm=1.0)
        optimizer.step()
        found = [*ends(params, optimizer), optimizer.grad_norm]
    finally:
        torch.set_num_threads(before)
    assert found[-1].item() == pytest.approx(norm_of(p.grad for p in params), rel=1e-14)
    if threads == 2:
        torch.set_num_threads(1)
        again = params_of((300_000, 70_000))
        give(again, 3)
        other = PagedAdamW(again, lr=0.1, max_grad_norm=1.0)
        other.step()
        torch.set_num_threads(before)
        assert equal(found, [*ends(again, other), other.grad_norm])


def test_the_norm_is_set_between_steps_and_taken_away() -> None:
    """Each step as that of an optimizer that had it from the beginning; without it, as one that never had it."""
    mine, other = params_of(), params_of()
    a, b = PagedAdamW(mine, lr=0.03), torch.optim.AdamW(other, lr=0.03)
    for seed, norm in enumerate([None, None, None, 1.0, 0.5, 0.5, None, None, 2.0]):
        a.max_grad_norm = norm
        assert a.max_grad_norm == norm
        give(mine, seed)
        give(other, seed)
        a.step()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(other, norm)
        b.step()
        for p, q in zip(mine, other, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


def test_an_infinite_norm_only_measures() -> None:
    mine, other = params_of(), params_of()
    a, b = PagedAdamW(mine, lr=0.03, max_grad_norm=math.inf), PagedAdamW(other, lr=0.03)
    assert a.grad_norm is None
    for seed in range(3):
        give(mine, seed, 9.0)
        give(other, seed, 9.0)
        a.step()
        b.step()
    assert equal(ends(mine, a), ends(other, b))
    assert b.grad_norm is None
    assert a.grad_norm.item() == pytest.approx(norm_of(p.grad for p in mine), rel=1e-14)


def test_norms_of_steps_are_tensors_of_their_own() -> None:
    params = params_of()
    optimizer = PagedAdamW(params, max_grad_norm=1.0)
    norms = []
    for seed in range(3):
        give(params, seed, seed + 1.0)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert norms[0] < norms[1] < norms[2]


def test_a_parameter_in_two_groups_counts_once_and_all_groups_count() -> None:
    p, q = params_of((40, 50))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = PagedSGD([{"params": [p, p]}, {"params": [q], "lr": 0.5}], lr=0.1, max_grad_norm=1.0)
    give((p, q), 0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm_of((p.grad, q.grad)), rel=1e-14)


@pytest.mark.parametrize("budget", [None, 0])
def test_groups_of_several_rules_have_one_norm(budget: Any) -> None:
    def run(kind: Any, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
        params = params_of((3000, 400, 500, 70))
        groups = [{"params": params[:1]}, {"params": params[1:3], "amsgrad": True}, {"params": params[3:], "lr": 0.5}]
        return params, kind(groups, lr=0.03, **options)

    (mine, a), (other, b) = run(PagedAdamW, max_grad_norm=1.0, device_budget=budget), run(torch.optim.AdamW)
    for seed in range(3):
        give(mine, seed)
        give(other, seed)
        a.step()
        torch.nn.utils.clip_grad_norm_(other, 1.0)
        b.step()
        assert a.grad_norm.item() == pytest.approx(norm_of(p.grad for p in mine), rel=1e-14)
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


def test_gradients_of_several_dtypes_and_complex_ones() -> None:
    params = [*params_of((300, 50)), *params_of((70,), BF16), *params_of((8,), F64)]
    params.append(torch.nn.Parameter(torch.randn(9, dtype=torch.complex64)))
    give(params[:-1], 0)
    params[-1].grad = torch.randn(9, dtype=torch.complex64)
    optimizer = PagedAdamW(params, lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm_of(p.grad for p in params), rel=1e-14)


def test_gradients_in_other_strides_than_their_parameters() -> None:
    def run(**options: Any) -> tuple[torch.nn.Parameter, Any]:
        p = torch.nn.Parameter(torch.arange(600.0).view(20, 30))
        optimizer = PagedSGD([p], lr=0.1, **options)
        p.grad = torch.arange(600.0).view(30, 20).t()
        optimizer.step()
        return p, optimizer

    p, optimizer = run(max_grad_norm=1.0)
    assert optimizer.grad_norm.item() == pytest.approx(norm_of([p.grad]), rel=1e-14)
    torch.testing.assert_close(p, torch.arange(600.0).view(20, 30) - 0.1 * p.grad / (p.grad.norm() + 1e-6))


def test_gradients_that_come_and_go_and_move() -> None:
    mine, other = params_of(), params_of()
    a, b = PagedAdamW(mine, lr=0.03, max_grad_norm=1.0), torch.optim.AdamW(other, lr=0.03)
    for seed in range(7):
        for params in (mine, other):
            give(params, seed)
            for i, p in enumerate(params):
                if (seed + i) % 3 == 0:
                    p.grad = None
        a.step()
        torch.nn.utils.clip_grad_norm_(other, 1.0)
        b.step()
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


def test_without_any_gradient_nothing_happens() -> None:
    params = params_of()
    optimizer = PagedAdamW(params, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == torch.nn.utils.clip_grad_norm_(params, 1.0) == 0
    assert not optimizer.state
    give(params, 0)
    optimizer.step()
    assert optimizer.grad_norm.item() > 0
    optimizer.zero_grad()
    before = ends(params, optimizer)
    optimizer.step()
    assert equal(before, ends(params, optimizer))
    assert optimizer.grad_norm.item() == 0


def test_a_first_step_without_gradients_over_loaded_state() -> None:
    params = params_of()
    optimizer = PagedAdamW(params, max_grad_norm=1.0)
    give(params, 0)
    optimizer.step()
    again = PagedAdamW(params, max_grad_norm=1.0)
    again.load_state_dict(optimizer.state_dict())
    again.zero_grad()
    again.step()
    assert again.grad_norm.item() == 0
    give(params[:1], 1)
    again.step()
    assert again.grad_norm.item() == pytest.approx(norm_of([params[0].grad]), rel=1e-14)


def test_an_optimizer_of_no_parameters_steps() -> None:
    optimizer = PagedAdamW([{"params": []}], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == 0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_clip(how: Any) -> None:
    params = params_of((30, 40))
    optimizer = PagedAdamW(params, lr=0.03, max_grad_norm=1.0)
    optimizer.max_grad_norm = 0.25
    give(params, 0)
    optimizer.step()
    copied = how(optimizer)
    assert copied.max_grad_norm == 0.25
    theirs = [p for group in copied.param_groups for p in group["params"]]
    for each, them in ((optimizer, params), (copied, theirs)):
        give(them, 1)
        each.step()
    assert equal(ends(params, optimizer), ends(theirs, copied))
    assert optimizer.grad_norm == copied.grad_norm


def test_int8_clips_on_every_budget() -> None:
    assert equal(clipped_run(state_format="int8"), clipped_run(state_format="int8", device_budget=0))


def test_a_class_of_ones_own_clips() -> None:
    from pagedopt import rule

    @rule
    def descent(param, grad, *, lr):  # type: ignore[no-untyped-def]
        return param - lr * grad

    class Descent(PagedOptimizer):
        rule = descent

        def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
            super().__init__(params, {"lr": lr}, **options)

    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.tensor([3.0, 4.0, 0.0, 0.0])
    Descent([p], max_grad_norm=1.0).step()
    torch.testing.assert_close(p, -0.1 * p.grad / 5)


def test_lion_clips() -> None:
    params = params_of()
    optimizer = PagedLion(params, lr=0.1, max_grad_norm=1.0)
    give(params, 0)
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].norm() < 0.02


def test_flushing_denormals_loses_no_address() -> None:
    """A table holds the address of the factor as a float64, which is a denormal number."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        flushed = clipped_run(device_budget=0)
        at_once = clipped_run()
    finally:
        torch.set_flush_denormal(False)
    assert equal(flushed, at_once)
    assert equal(flushed, clipped_run())
