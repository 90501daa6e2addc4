"""Forms of AdamW's and Lion's update: what ships, and how differences are told."""

from __future__ import annotations

import pytest
import torch

from experiments.step.arithmetic import difference
from experiments.works.forms import BASE, SHIPPED, step


def test_written_out_adamw_is_what_ships() -> None:
    draw = torch.Generator().manual_seed(0)
    begin = [torch.rand(4096, generator=draw) for _ in range(4)]
    shipped, written = (step("AdamW", name, [t.clone() for t in begin], 7) for name in (SHIPPED, BASE))
    assert all(map(torch.equal, shipped, written))
    assert not torch.equal(shipped[0], begin[0])


def test_differences_are_told_in_ulp_and_errors_by_the_rms() -> None:
    usual = torch.tensor([1.0, 1.5, -4.0])
    once = usual + torch.tensor([0.0, 2.0, -1.0]) * torch.finfo(torch.float32).eps
    exact = torch.tensor([3.0, 3.0, -3.0], dtype=torch.float64)
    found = exact.float() + torch.tensor([0.0, 0.0, 1.5])
    assert difference(found, exact, once, usual) == {"rms": pytest.approx(0.5 / 3**0.5), "most": 0.5, "ulps": 2}
