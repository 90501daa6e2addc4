"""The fixed-point format that notes/extending.md shows: its steps, in every place.

``tests/kernels/test_kernels_formats.py`` plays the threads of its CUDA text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedopt import PagedAdamW

from .element_format import Fixed16
from .training import PLACES, Params, bits, parameters, same, train

FIXED = Fixed16()
FORMAT = {"exp_avg": FIXED, "exp_avg_sq": "float32"}


def made(dtype: torch.dtype = torch.float32, **how: Any) -> tuple[PagedAdamW, Params]:
    params = parameters(dtype=dtype)
    return PagedAdamW(params, lr=0.01, **{"state_format": FORMAT, **how}), params


@pytest.mark.parametrize("how", PLACES, ids=str)
def test_no_place_changes_a_bit(how: dict[str, Any]) -> None:
    found = []
    for options in ({}, how):
        opt, params = made(**options)
        train(opt, params, 0, 5)
        found.append(bits(opt, params))
    assert same(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_does_what_it_would_do_with_decoded_state(dtype: torch.dtype) -> None:
    """Which torch's optimizer could load: numbers that are larger than 1 are cut off."""
    opt, params = made(dtype)
    for step in range(5):
        twin, twins = made(dtype, state_format="float32")
        for p, q in zip(params, twins, strict=True):
            q.data.copy_(p)
        twin.load_state_dict(opt.decoded_state_dict())
        train(opt, params, step, step + 1)
        train(twin, twins, step, step + 1)
        assert same([p.detach() for p in params], [q.detach() for q in twins])
        for p, q in zip(params, twins, strict=True):
            stored, number = opt.state[p]["exp_avg"], twin.state[q]["exp_avg"]
            assert torch.equal(stored, FIXED.encode(number)[0])
            assert (stored.dtype, bool(stored.any())) == (torch.int16, True)


def test_numbers_that_it_cannot_store_are_cut_off() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    opt = PagedAdamW([p], state_format=FORMAT)
    p.grad = torch.tensor([1.0, 50.0, -50.0, 0.0])
    opt.step()
    assert opt.state[p]["exp_avg"].tolist() == [round(0.1 * 32768), 32767, -32767, 0]
