"""Lion's defaults are those of its paper."""

from __future__ import annotations

import torch

from pagedopt import PagedLion


def test_defaults() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    defaults = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    assert PagedLion([p]).param_groups[0].items() >= defaults.items()
