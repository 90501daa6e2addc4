"""Norms and steps that are refused: nothing has changed then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.kernels import cpu
from tests.optim.clipped import ends, equal, give, params_of


@pytest.mark.parametrize("value", [0, -1.0, math.nan, -math.inf])
def test_numbers_that_are_no_norm_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"max_grad_norm is {value}; it must be above 0; None: gradients are not"):
        PagedAdamW(params_of(), max_grad_norm=value)
    optimizer = PagedAdamW(params_of(), max_grad_norm=3)
    with pytest.raises(ValueError, match="must be above 0"):
        optimizer.max_grad_norm = value
    assert optimizer.max_grad_norm == 3.0


@pytest.mark.parametrize("value", ["1.0", True, torch.tensor(1.0), [1.0]])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"max_grad_norm is .*; it must be a number above 0, or None"):
        PagedAdamW(params_of(), max_grad_norm=value)


def test_a_step_within_a_backward_pass_is_refused() -> None:
    """An optimizer for each parameter steps there: it would clip by a norm of its own."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = PagedSGD([p], lr=0.1, max_grad_norm=1.0)
    p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"max_grad_norm is 1.0, and step\(\) was called within a backward pass"):
        (p * 2).sum().backward()
    assert torch.equal(p, torch.ones(3))
    optimizer.max_grad_norm = None
    (p * 2).sum().backward()
    assert not torch.equal(p, torch.ones(3))


def test_a_step_that_fails_before_its_launch_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of()
    optimizer = PagedAdamW(params, max_grad_norm=1.0)
    give(params, 0)
    optimizer.step()
    before = ends(params, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            optimizer.step()
    assert equal(before, ends(params, optimizer))
    optimizer.step()
