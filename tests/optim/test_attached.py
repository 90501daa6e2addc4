"""Attached to its model an optimizer makes the bits that it makes alone, whatever else it does in its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_support import bits, same
from overlapped import SmallPages
from sixteen_training import OPTIONS

from pagedopt import PagedAdamW, PagedSGD, ema

BOTH = ("forward", "backward")
#: Class, options, and where it is hidden: a norm is known behind the backward.
CASES: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "clipped": (PagedAdamW, {"max_grad_norm": 0.01}, BOTH[:1]),
    "clipped and scaled": (PagedAdamW, {"max_grad_norm": 0.01, "fused": True}, BOTH[:1]),
    "without what is not finite": (PagedAdamW, {"max_grad_norm": 1.0, "skip_nonfinite": True}, BOTH[:1]),
    "averaged": (PagedAdamW, {"after": ema(0.9)}, BOTH),
    "averaged, SGD": (PagedSGD, {"after": ema(0.9)}, BOTH),
    "rounded at random": (PagedAdamW, OPTIONS["stochastic"], BOTH),
    "16 bits and 8 more": (PagedAdamW, OPTIONS["+8 int8"], BOTH),
}


def trained(kind: Any, options: dict[str, Any], overlap: Any) -> tuple[list[torch.Tensor], Any]:
    """All that comes of seven steps, of which the fourth is left out where that is what is done."""
    torch.manual_seed(3)
    dtype = torch.bfloat16 if "param_format" in options or "param_rounding" in options else torch.float32
    model = torch.nn.Sequential(*(each for _ in range(6) for each in (torch.nn.Linear(90, 90), torch.nn.Tanh())))
    optimizer = kind(model.to(dtype).parameters(), lr=0.03, placement=SmallPages, device_budget=0, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled="fused" in options)
    found = []
    if overlap:
        optimizer.attach(model, overlap=overlap)
    for step in range(7):
        loss = model(torch.randn(4, 90).to(dtype)).square().mean()
        scaler.scale(loss).backward()
        left_out = step == 3 and bool({"fused", "skip_nonfinite"} & options.keys())
        if left_out:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [loss.detach()] + [optimizer.grad_norm] * ("max_grad_norm" in options and not left_out)
        if "after" in options and step % 3 == 2:  # it waits for the update
            with optimizer.averaged():
                found.append(model(torch.ones(90)).detach())
    optimizer.wait()
    return [*found, *bits(model.parameters(), optimizer)], optimizer


@pytest.mark.filterwarnings("error:parameter .* was written", "ignore:this step was not queued.*no forward")
@pytest.mark.parametrize(
    ("name", "overlap"), [(name, overlap) for name, (*_, hidden) in CASES.items() for overlap in hidden]
)
def test_a_hidden_update_changes_no_bit(name: str, overlap: str) -> None:
    """And is no write of somebody else's."""
    kind, options, _ = CASES[name]
    (plain, _), (hidden, optimizer) = trained(kind, options, None), trained(kind, options, overlap)
    assert same(plain, hidden)
    assert overlap == "backward" or optimizer.overlap_report().hidden > 10
    assert optimizer.skipped == ("skip_nonfinite" in options)
