"""Optimizers that were pickled before their modules were moved (commit ba8c2db)."""

from __future__ import annotations

import pickle

import pytest
import torch
from optim_support import step_on_ones
from paths import DATA

import pagedopt

#: By class: the pickle of an optimizer after three steps, and its parameter after one more with gradients of one.
PICKLES = DATA / "optimizers-ba8c2db.pickle"


@pytest.mark.parametrize("name", ["PagedAdamW", "PagedSGD", "PagedLion"])
def test_an_optimizer_that_was_pickled_then_goes_on(name: str) -> None:
    pickled, after = pickle.loads(PICKLES.read_bytes())[name]
    optimizer = pickle.loads(pickled)
    assert type(optimizer) is getattr(pagedopt, name)
    (p,) = optimizer.param_groups[0]["params"]
    step_on_ones(optimizer)
    torch.testing.assert_close(p, torch.tensor(after), rtol=2**-22, atol=0)  # rounded once today, twice then
