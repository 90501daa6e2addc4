"""Vertical fusion on a GPU: every way gives eager's numbers, and kernels of the questions are right."""

from __future__ import annotations

import pytest
import torch
from gpu_support import launching

from experiments.vertical import roofline, spill
from experiments.vertical.spill import registers
from experiments.vertical.traffic import LIST, NORM, ONCE, OTHERS, RULE, RULES, TWICE, WORKS
from experiments.works.witnesses import EAGER

pytestmark = launching()
#: What torch.compile makes takes seconds, and is torch's.
WAYS = [(ONCE, RULE), *((TWICE, name) for name in (RULE, RULES, *OTHERS)), (NORM, LIST)]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(("work", "name"), WAYS)
def test_a_way_gives_the_numbers_of_eager(work: str, name: str, device: torch.device) -> None:
    _, ways = WORKS[work](device, True)
    found, exact = ways[name].make()(), ways[EAGER].make()()
    torch.testing.assert_close(found.flatten(), exact.flatten())


@pytest.mark.parametrize("k", [1, 7, 100])
def test_the_fused_chain_is_the_chain(k: int, device: torch.device) -> None:
    x = torch.rand(4 * 1001, device=device)  # not a whole number of blocks
    y = torch.empty_like(x)
    roofline.fused(device)(x, y, k)
    torch.testing.assert_close(y.double(), x.double() * (1 + roofline.A) ** k, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("width", "threads"), [(8, 256), (128, 1024), (320, 1024)])
def test_fused_and_two_passes_divide_by_the_same_sum(width: int, threads: int, device: torch.device) -> None:
    x, y = (torch.rand(width * 3000, device=device) for _ in "xy")
    columns = x.view(width, -1).double()
    for case in spill.calls(x, y, width, threads):
        y.zero_()
        case.run()
        torch.testing.assert_close(y.view(width, -1).double(), columns / columns.sum(0), rtol=1e-5, atol=0)
    for _ in range(2):  # the second time NVRTC's own cache could answer, which says nothing
        said = registers(spill.TEXT, "fused", "sm_90", *spill.defines(width, threads))
        assert (said["spill_stores"] > 0) is (width > 64)
