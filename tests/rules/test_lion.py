"""Lion runs wherever AdamW does: dtypes, formats, placements, checkpoints, copies, parameters that come later."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from reference_lion import Lion
from support import BF16, F16, F32, F64

from pagedopt import PagedLion
from tests.specs import LION
from tests.world import groups_of, numbers, parameters, steps

PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "host": {"placement": "host"},
    "file": {"device_budget": 0},
    "half": {"device_budget": 90_000},
}


def trained(dtype: torch.dtype, how: dict[str, Any], optimizer: Any = PagedLion) -> tuple[Any, list[torch.Tensor]]:
    """Four steps; a late parameter joins after two, another misses a gradient."""
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    made = optimizer(groups_of(params[:-1]), **LION.hyper, **how)
    steps(made, params[:-1], 2)
    made.add_param_group({"params": params[-1:], "lr": 0.02})
    steps(made, params, 1, first=2)
    for i, p in enumerate(params):
        p.grad = None if i == 1 else numbers(tuple(p.shape), 77 + i).to(dtype)
    made.step()
    return made, params


def values(optimizer: Any, params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone() for p in params for t in (p, optimizer.state[p]["exp_avg"])]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_against_float64(dtype: torch.dtype, place: str) -> None:
    ours, theirs = trained(dtype, PLACES[place]), trained(F64, {}, Lion)
    bound = 64 * torch.finfo(dtype).eps
    for got, want in zip(values(*ours), values(*theirs), strict=True):
        assert (got.double() - want).abs().max() <= bound, "an update is 0.01 to 0.07"


@pytest.mark.parametrize("state_format", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_where_state_lies_changes_no_bit(dtype: torch.dtype, state_format: str | None) -> None:
    found = [values(*trained(dtype, {**how, "state_format": state_format})) for how in PLACES.values()]
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    assert found[0][1].dtype is (getattr(torch, state_format) if state_format else dtype)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state dict"])
@pytest.mark.parametrize("place", PLACES)
def test_copies_go_on_alike(place: str, how: str) -> None:
    optimizer, params = trained(F32, PLACES[place])
    if how == "deepcopy":
        other, twins = copy.deepcopy((optimizer, params))
    elif how == "pickle":
        other, twins = pickle.loads(pickle.dumps((optimizer, params)))
    else:
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = PagedLion([*groups_of(twins[:-1]), {"params": twins[-1:]}], **PLACES[place])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.memory_report().by_place == other.memory_report().by_place
    for each, theirs in ((optimizer, params), (other, twins)):
        steps(each, theirs, 2, first=9)
    assert all(torch.equal(a, b) for a, b in zip(values(optimizer, params), values(other, twins), strict=True))


def test_defaults() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    defaults = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    assert PagedLion([p]).param_groups[0].items() >= defaults.items()
