"""Steps whose norm is not finite are left out: beside torch under a plain ``if``, and where that is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from pagedopt import PagedAdamW, PagedLion, PagedSGD
from tests.optim.clipped import ends, equal, give, params_of

LOST = {0: math.inf, 3: math.nan, 4: -math.inf}
PAGED = {"device_budget": 0}
WAYS = [{}, PAGED, {"fused": True}, {"state_format": "int8"}, {"max_grad_norm": math.inf}]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]


def gradients(params: list[torch.nn.Parameter], number: int) -> None:
    """The last parameter's come late."""
    give(params, number)
    params[1].grad.view(-1)[3] = LOST.get(number, 0.5)
    if number < 2:
        params[-2].grad = None


SGD: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize(
    ("ours", "theirs", "hyper", "options"),
    [*((PagedAdamW, torch.optim.AdamW, {}, way) for way in WAYS), (PagedSGD, torch.optim.SGD, SGD, PAGED)],
    ids=str,
)
def test_it_is_a_step_behind_an_if(ours: Any, theirs: Any, hyper: dict[str, Any], options: dict[str, Any]) -> None:
    options = {"max_grad_norm": 1.0, "skip_nonfinite": True, **options}
    rounds = "state_format" in options
    mine, other = params_of(), params_of()
    a = ours(groups(mine), lr=0.03, **hyper, **options)
    if rounds:  # beside ours, to the bit
        b = ours(groups(other), lr=0.03, **hyper, **{**options, "skip_nonfinite": False})
    else:
        b = theirs(groups(other), lr=0.03, **hyper)
    for number in range(6):
        gradients(mine, number)
        gradients(other, number)
        before = ends(mine, a)
        a.step()
        assert math.isfinite(a.grad_norm) is (number not in LOST)
        if number in LOST:
            assert equal(before, ends(mine, a))
            continue
        if not rounds:
            torch.nn.utils.clip_grad_norm_(other, options["max_grad_norm"])
        b.step()
    assert a.skipped == len(LOST)
    tolerance = 0 if rounds else 2e-6
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert a.state[p].keys() == b.state[q].keys()
        assert a.state[p].get("step") == b.state[q].get("step")


def test_a_scaler_and_the_norm_both_leave_steps_out() -> None:
    """An overflow that the scaler does not see is the norm's: its own unscaled gradient is finite."""
    params = params_of()
    optimizer = PagedAdamW(params, fused=True, max_grad_norm=1.0, skip_nonfinite=True)
    for number, found_inf in enumerate([0.0, 0.0, 1.0, 0.0]):
        give(params, number)
        if number in (1, 2):
            params[0].grad[5] = math.inf
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2
    assert optimizer.skipped == 2
    assert torch.isfinite(params[0]).all()


def test_the_forward_hides_no_step_that_is_left_out() -> None:
    models = [torch.nn.Linear(30, 30) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [PagedAdamW(m.parameters(), max_grad_norm=1.0, skip_nonfinite=True, **PAGED) for m in models]
    optimizers[0].attach(models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(5):
            optimizer.zero_grad()
            x = torch.full((2, 30), math.inf if number == 2 else float(number))
            model(x).sum().backward()
            optimizer.step()
        optimizer.wait()
        assert optimizer.skipped == 1
    assert equal(*(ends(m.parameters(), o) for m, o in zip(models, optimizers, strict=True)))


def test_what_does_not_go_with_it_is_refused() -> None:
    said = r"max_grad_norm is None, and skip_nonfinite=True leaves out steps by their norm; give max_grad_norm a number"
    with pytest.raises(ValueError, match=said):
        PagedAdamW(params_of(), skip_nonfinite=True)
    with pytest.raises(TypeError, match="skip_nonfinite is 1; it must be True or False"):
        PagedAdamW(params_of(), max_grad_norm=1.0, skip_nonfinite=1)
    optimizer = PagedLion(params_of(), max_grad_norm=1.0, skip_nonfinite=True)
    with pytest.raises(ValueError, match=said):
        optimizer.max_grad_norm = None
    assert optimizer.max_grad_norm == 1.0
    model = torch.nn.Linear(3, 3)
    optimizer = PagedLion(model.parameters(), max_grad_norm=1.0, skip_nonfinite=True)
    with pytest.raises(ValueError, match="the norm of all gradients is known after the backward"):
        optimizer.attach(model, overlap="backward")


def test_a_copy_leaves_out_steps_and_counts_its_own() -> None:
    params = params_of()
    optimizer = PagedAdamW(params, max_grad_norm=1.0, skip_nonfinite=True)
    copies = [optimizer, copy.deepcopy(optimizer)]
    for p in copies[1].param_groups[0]["params"]:
        p.grad = torch.full_like(p, math.nan)
    copies[1].step()
    assert [each.skipped for each in copies] == [0, 1]
