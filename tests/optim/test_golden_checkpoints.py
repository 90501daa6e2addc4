"""Checkpoints that must load for ever: written by pagedopt at 5d310f2 on a CPU and on a GPU, read wherever state lives.

``tests/optim/write_golden.py`` wrote the files.  One of a GPU, spilled or not, is read on a CPU as well.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from optim_support import through_file
from paths import DATA

import pagedopt

FILES = {device: DATA / f"pagedopt-5d310f2-{device}.pt" for device in ("cpu", "cuda")}
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "resident": {},
        "host": {"placement": "host"},
        "file": {"placement": "file", "device_budget": 0},
        "half in a file": {"placement": "file", "device_budget": "50%"},
    },
    "cuda": {
        "resident": {},
        "host": {"placement": "host"},
        "staged": {"placement": "mapped", "device_budget": 0, "host_access": "staged"},
        "half staged": {"placement": "mapped", "device_budget": "50%", "host_access": "staged"},
        "half in place": {"placement": "mapped", "device_budget": "50%", "host_access": "in_place"},
        "half managed": {"placement": "managed", "device_budget": "50%"},
        "managed by the driver": {"placement": "managed-driver"},
    },
}
#: Of the largest magnitude: what another order of operations may change in a few steps.  The files were written with
#: others than today's, in which these steps end at most 1.1 * 2**-23 away.
TOLERANCE = {torch.float32: 4 * 2**-23, torch.bfloat16: 2**-7}

CASES = [
    pytest.param(written, device, place, marks=NEEDED if device == "cuda" else [], id=f"{written}-{device}-{place}")
    for written in FILES
    for device in PLACES
    for place in PLACES[device]
]


@functools.cache
def read(written: str) -> dict[str, Any]:
    if not FILES[written].exists():
        pytest.skip(f"there is no {FILES[written].name} yet: tests/optim/write_golden.py says how it is made")
    found: dict[str, Any] = torch.load(FILES[written], weights_only=True, map_location="cpu")
    return found["cases"]


def opened(case: dict[str, Any], device: str, options: dict[str, Any]) -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters and an optimizer of today, of other hyperparameters, before loading."""
    params = [torch.nn.Parameter(p.to(device, copy=True)) for p in case["params"]]
    groups = [{"params": params[:2], "lr": 1.0}, {"params": params[2:]}]
    optimizer = getattr(pagedopt, case["class"])(groups, state_format=case["state_format"], **options)
    return params, optimizer


@pytest.mark.parametrize(("written", "device", "place"), CASES)
def test_a_checkpoint_of_old_loads_to_the_bit_and_goes_on(written: str, device: str, place: str) -> None:
    for name, case in read(written).items():
        params, optimizer = opened(case, device, PLACES[device][place])
        optimizer.load_state_dict(copy.deepcopy(case["state_dict"]))
        assert_holds(name, params, optimizer, case["state_dict"])
        for _ in range(case["steps"]):
            for p, grad in zip(params, case["grads"], strict=True):
                p.grad = grad.to(device, copy=True)
            optimizer.step()
        for p, want in zip(params, case["after"], strict=True):
            far = (p.detach().cpu().double() - want.double()).abs().max()
            bound = TOLERANCE[want.dtype]
            if case["state_format"] == "bfloat16":  # a rounding of it is 2^-8, and a step takes lr of that
                bound += 2**-8 * case["state_dict"]["param_groups"][0]["lr"]
            assert far <= bound * float(want.double().abs().max()), (name, float(far))


def assert_holds(name: str, params: list[torch.nn.Parameter], optimizer: Any, saved: dict[str, Any]) -> None:
    for i, p in enumerate(params):
        entry, want = optimizer.state.get(p, {}), saved["state"].get(i, {})
        assert list(entry) == list(want), name
        torch.testing.assert_close(entry, want, rtol=0, atol=0, check_device=False, msg=lambda text: f"{name}: {text}")
    for group, want in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        assert all(group[key] == value for key, value in want.items() if key != "params"), name


@pytest.mark.parametrize("written", FILES)
def test_a_state_dict_of_old_goes_to_torch_by_way_of_ours(written: str) -> None:
    for name, case in read(written).items():
        params, optimizer = opened(case, "cpu", PLACES["cpu"]["half in a file"])
        optimizer.load_state_dict(copy.deepcopy(case["state_dict"]))
        kind = getattr(torch.optim, case["class"].removeprefix("Paged"))
        theirs = kind([{"params": params[:2]}, {"params": params[2:]}])
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for i, p in enumerate(params):
            want = case["state_dict"]["state"].get(i, {})
            assert list(theirs.state.get(p, {})) == list(want), name
            same = [theirs.state[p][key].equal(value.to(theirs.state[p][key].dtype)) for key, value in want.items()]
            assert all(same), name


@pytest.mark.parametrize("place", [pytest.param(place, marks=NEEDED) for place in PLACES["cuda"]])
def test_spilled_on_a_gpu_and_opened_on_a_laptop(place: str) -> None:
    """What is written today on a GPU holds the same bits where there is none, in memory and in a file."""
    case = read("cpu")["adamw, resident"]
    _, there = opened(case, "cuda", PLACES["cuda"][place])
    there.load_state_dict(copy.deepcopy(case["state_dict"]))
    for options in PLACES["cpu"].values():
        params, here = opened(case, "cpu", options)
        here.load_state_dict(through_file(there.state_dict(), map_location="cpu"))
        assert_holds(place, params, here, case["state_dict"])
