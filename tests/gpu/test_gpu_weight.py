"""Experiments weigh what was asked of torch's allocator, and what it makes of that apart from it."""

from __future__ import annotations

import torch
from gpu_support import NEEDED

from experiments.works.weight import Scales, extra

pytestmark = NEEDED


def test_a_number_is_four_bytes_and_its_block_512() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.ones(1, device=device)
    scales = Scales(device)
    kept = torch.ones(1, device=device)
    assert (scales.since()["taken"], scales.since()["rounding"]) == (4, 508)
    del kept
    assert (scales.since()["taken"], scales.since()["rounding"]) == (0, 0)


def test_the_peak_of_a_step_is_what_it_asked_for_at_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert extra(lambda: torch.ones(1000, device=device).exp(), device) == 8000
    assert extra(lambda: torch.ones(1000, device=device), device) == 4000
