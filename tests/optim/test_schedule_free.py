"""PagedScheduleFreeAdamW trains y and evaluates x, as its authors' code: x is between y and z, and neither is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_support import through_file

from pagedopt import PagedScheduleFreeAdamW


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
