"""Optimizers that were pickled before their modules were moved (commit ba8c2db), and what pickles of today name."""

from __future__ import annotations

import importlib
import io
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


#: What pickles of optimizers and of attached models name, which has to stay where it is.
NAMED = {
    "pagedopt.optim.adamw PagedAdamW",
    "pagedopt.optim.sgd PagedSGD",
    "pagedopt.optim.lion PagedLion",
    *(
        f"pagedopt.optim.overlap.hooks {name}"
        for name in ("Begin", "Enter", "Leave", "Raised", "Fence", "Load", "Compiled")
    ),
}


class Noting(pickle.Unpickler):
    """Notes what of the package a pickle names."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self.named: set[str] = set()

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] == "pagedopt":
            self.named.add(f"{module} {name}")
        return super().find_class(module, name)


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
@pytest.mark.parametrize("name", ["PagedAdamW", "PagedSGD", "PagedLion"])
def test_pickles_name_only_what_stays_where_it_is(name: str, overlap: str | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = getattr(pagedopt, name)(model.parameters(), device_budget=0)
    if overlap is not None:
        optimizer.attach(model, overlap=overlap)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for one in (optimizer, model):
        noting = Noting(pickle.dumps(one))
        noting.load()
        assert noting.named <= NAMED
        assert noting.named or one is model
    for module, what in map(str.split, NAMED):
        assert hasattr(importlib.import_module(module), what)
