"""How many functions of the package a warm step runs through: each costs host time, most of all with cold caches."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from file_support import folder_for_state

import pagedopt
from pagedopt import PagedAdamW

PACKAGE = str(Path(pagedopt.__file__).parent) + "/"


def calls(act: Any) -> list[str]:
    """Files of the package's functions that one call runs through, in this thread."""
    found: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


def changes_of_room(files: list[str]) -> int:
    rooms = [file.partition("/")[0] for file in files]
    return sum(a != b for a, b in itertools.pairwise(rooms))


@pytest.mark.parametrize(("anew", "most"), [(False, 45), (True, 55)], ids=["kept", "anew"])
def test_a_warm_step_over_one_tensor_is_few_calls(anew: bool, most: int) -> None:
    params = [torch.nn.Parameter(torch.ones(4))]
    opt = PagedAdamW(params)
    for step in range(6):
        if anew or not step:
            old = params[0].grad  # alive: the next one lies elsewhere
            params[0].grad = torch.ones(4)
        found = calls(opt.step)
    assert old is None or old.data_ptr() != params[0].grad.data_ptr()
    assert len(found) <= most
    assert changes_of_room(found) <= 25


def test_a_warm_step_over_a_file_is_few_calls() -> None:
    with folder_for_state():
        params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(8)]
        opt = PagedAdamW(params, device_budget=0)
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(4):
            found = calls(opt.step)
        (arena,) = opt.store.arenas
        assert arena.layout.pages == 16
        assert len(found) <= 130
        opt.set_device_budget("50%")
        for _ in range(3):
            half = calls(opt.step)
        assert len(found) - len(half) <= 6 * 8, "of which at most six for each page"
