"""How many functions of the package a warm step runs through: each costs host time, most of all with cold caches."""

from __future__ import annotations

import itertools
from types import CodeType

import pytest
import torch
from calls import PACKAGE, calls
from optim_support import ready

from pagedopt import PagedAdamW


def changes_of_room(functions: list[CodeType]) -> int:
    rooms = [function.co_filename.removeprefix(PACKAGE).partition("/")[0] for function in functions]
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


def test_a_first_step_of_one_parameter_is_few_calls() -> None:
    for _ in range(2):  # the first of a process loads its kernel
        opt = PagedAdamW([param := ready(4)])
        found = calls(opt.step)
    assert param in opt.state
    assert len(found) <= 390


@pytest.mark.usefixtures("folder")
def test_a_warm_step_over_a_file_is_few_calls() -> None:
    opt = PagedAdamW([ready(1 << 20) for _ in range(8)], device_budget=0)
    for _ in range(4):
        found = calls(opt.step)
    (arena,) = opt.store.arenas
    assert arena.layout.pages == 16
    assert len(found) <= 158  # 16 of them go on in a generator, behind each launch
    opt.set_device_budget("50%")
    for _ in range(3):
        half = calls(opt.step)
    assert len(found) - len(half) <= 6 * 8, "of which at most six for each page"
