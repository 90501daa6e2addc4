"""PagedScheduleFreeAdamW trains y and evaluates x, as its authors' code: x is between y and z, and neither is lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from optim_support import through_file

import pagedopt
from pagedopt import PagedScheduleFreeAdamW, ema
from pagedopt.rules.schedule_free import schedule_free_adamw, to_average


def trained(params: list[torch.nn.Parameter], **options: Any) -> PagedScheduleFreeAdamW:
    optimizer = PagedScheduleFreeAdamW(params, lr=0.1, betas=(0.8, 0.99), **options)
    for step in range(4):
        for p in params:
            p.grad = torch.sin(p.detach().float() * (step + 2)).to(p.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("how", [{}, {"device_budget": 0}], ids=["resident", "file"])
def test_it_goes_to_the_average_and_back_and_refuses_a_step_there(how: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n, dtype=torch.float64)) for n in (70_000, 3)]
    late = torch.nn.Parameter(torch.ones(2))  # without a gradient it stays
    optimizer = PagedScheduleFreeAdamW([*params, late], lr=0.1, betas=(0.8, 0.99), **how)
    for step in range(4):
        for p in params:
            p.grad = torch.sin(p.detach() * (step + 2))
        optimizer.step()
    trained = [p.detach().clone() for p in params]
    optimizer.eval()
    for p, y in zip(params, trained, strict=True):
        z = optimizer.state[p]["z"]
        torch.testing.assert_close(0.8 * p.detach() + 0.2 * z, y)
        assert (p.detach() - y).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match=r"parameters are the average, .*call optimizer.train\(\) before a step"):
        optimizer.step()
    other = PagedScheduleFreeAdamW([*params, late], **how)
    other.load_state_dict(through_file(optimizer.state_dict()))
    other.train()
    other.train()
    for p, y in zip(params, trained, strict=True):
        torch.testing.assert_close(p.detach(), y)
    other.step()
    assert torch.equal(late, torch.ones(2))


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_no_step_is_taken_at_the_average_by_an_attached_model(overlap: Any) -> None:
    model = torch.nn.Linear(5, 5)
    optimizer = PagedScheduleFreeAdamW(model.parameters(), lr=0.1)
    optimizer.attach(model, overlap=overlap)
    for averaged in (False, True):
        if averaged:
            optimizer.eval()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"call optimizer.train\(\)") if averaged else contextlib.nullcontext():
            model(torch.ones(5)).sum().backward()
            optimizer.step()
        optimizer.wait()
        same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert same == [averaged] * 2
        optimizer.zero_grad()


def test_it_does_not_change_places_within_averaged() -> None:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 300))]
    optimizer = trained(params, after=ema(0.9))
    y = params[0].detach().clone()
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"within averaged\(\)"):
        optimizer.eval()
    optimizer.train()
    assert torch.equal(params[0], y)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_twice_in_a_group_goes_once() -> None:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 300))
    optimizer = trained([param, param])
    y = param.detach().clone()
    optimizer.eval()
    torch.testing.assert_close(0.8 * param.detach() + 0.2 * optimizer.state[param]["z"], y)


def test_the_bits_beside_a_parameter_go_along() -> None:
    began = torch.linspace(-1, 1, 300)
    narrow, wide = torch.nn.Parameter(began.bfloat16()), torch.nn.Parameter(began.bfloat16().float())
    grads = [torch.sin(began * (step + 2)).bfloat16() for step in range(4)]
    pair = [(p, PagedScheduleFreeAdamW([p], lr=0.1, **how))
            for p, how in ((narrow, {"param_format": "bfloat16+16"}), (wide, {}))]  # fmt: skip
    for grad in grads:
        for p, optimizer in pair:
            p.grad = grad.to(p.dtype)
            optimizer.step()
            optimizer.eval()
        assert torch.equal(pair[0][1].master(narrow), wide)
        for _, optimizer in pair:
            optimizer.train()
        assert torch.equal(pair[0][1].master(narrow), wide)


def test_a_first_beta_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"betas=\(0.0, 0.9\): the first is above 0, or eval\(\) cannot find"):
        PagedScheduleFreeAdamW([torch.nn.Parameter(torch.ones(2))], betas=(0.0, 0.9))


@pytest.mark.parametrize(
    ("dtype", "form", "stored"),
    [("bfloat16", None, "float32"), ("float64", None, "float64"), ("bfloat16", "bfloat16", "bfloat16"),
     ("bfloat16", {"z": "float64", "exp_avg_sq": "float32"}, "float64")],
)  # fmt: skip
def test_weights_are_float32_unless_a_format_is_named(dtype: str, form: Any, stored: str) -> None:
    params = [torch.nn.Parameter(torch.ones(300, dtype=getattr(torch, dtype)))]
    assert trained(params, state_format=form).state[params[0]]["z"].dtype is getattr(torch, stored)
    of_squares = dtype if form is None else form["exp_avg_sq"] if isinstance(form, dict) else form
    said, named = (
        pagedopt.estimate(params, rule=schedule_free_adamw, state_format=each)
        for each in (form, {"z": stored, "exp_avg_sq": of_squares})
    )
    assert said.by_place == named.by_place


def test_a_second_rule_names_the_state_that_is_not_there() -> None:
    optimizer = pagedopt.PagedAdamW([p := torch.nn.Parameter(torch.ones(3))])
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ValueError, match=r"rule 'to_average' takes 'z'; the state .* is 'step', 'exp_avg'"):
        optimizer.apply(to_average, optimizer.param_groups[0])
