"""Our optimizers take the same steps, in float64, as the package ``pytorch_optimizer`` where it follows the paper.

We wrote ``tests/references.py`` ourselves, from the papers that our rules follow; that package is independent of us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pagedopt

theirs = pytest.importorskip("pytorch_optimizer")

COMMON = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SIGNS = {"lr": 0.03, "weight_decay": 0.1}
THREE = {**COMMON, "betas": (0.8, 0.95, 0.97)}
#: Ours, theirs, what both take, what ours takes, what theirs takes, and how far they may be apart.
SAME = [
    ("PagedLion", "Lion", {**SIGNS, "betas": (0.8, 0.95)}, {}, {}, 1e-14),
    ("PagedSignum", "SignSGD", {**SIGNS, "momentum": 0.8}, {}, {}, 1e-14),
    ("PagedAdan", "Adan", THREE, {}, {}, 1e-14),
    ("PagedAdEMAMix", "AdEMAMix", {**THREE, "alpha": 3.0}, {}, {"weight_decouple": True}, 1e-14),
    (
        "PagedAdEMAMix", "AdEMAMix", {**THREE, "alpha": 3.0}, {"alpha_warmup": 7, "beta3_warmup": 7},
        {"weight_decouple": True, "t_alpha_beta3": 7}, 1e-14,
    ),
    # Theirs decays in the first step, too, and its clip counts that step; the authors' code does neither.
    ("PagedADOPT", "ADOPT", {**COMMON, "weight_decay": 0}, {}, {"clip_lambda": lambda step: (step - 1) ** 0.25}, 1e-14),
    # Theirs adds eps to the root before it is corrected, and decays behind the update.
    ("PagedLaProp", "LaProp", {**COMMON, "weight_decay": 0, "eps": 1e-15}, {}, {}, 1e-8),
    # Our sum of weights is float32.
    ("PagedScheduleFreeAdamW", "ScheduleFreeAdamW", {**COMMON, "warmup_steps": 4}, {}, {}, 1e-8),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "their", "both", "of_ours", "of_theirs", "apart"), SAME)
def test_it_goes_where_theirs_goes(
    ours: str, their: str, both: dict[str, Any], of_ours: dict[str, Any], of_theirs: dict[str, Any], apart: float
) -> None:
    way = trajectory(getattr(pagedopt, ours), {**both, **of_ours})
    assert len(way.unique(dim=0)) >= 12, "it goes somewhere"
    torch.testing.assert_close(way, trajectory(getattr(theirs, their), {**both, **of_theirs}), rtol=0, atol=apart)


def trajectory(optimizer_of: Callable[..., torch.optim.Optimizer], hyper: dict[str, Any]) -> torch.Tensor:
    """The parameter after each of 12 steps, in float64."""
    generator = torch.Generator().manual_seed(3)
    param = torch.nn.Parameter(torch.randn(40, generator=generator, dtype=torch.float64))
    optimizer, points = optimizer_of([param], **hyper), []
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(12):
        param.grad = torch.randn(40, generator=generator, dtype=torch.float64)
        optimizer.step()
        points.append(param.detach().clone())
    return torch.stack(points)
