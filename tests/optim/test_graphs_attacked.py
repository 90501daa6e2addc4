"""What an attack on launches and copies has found, on a CPU, too: each once failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pagedopt import PagedAdamW
from pagedopt.formats import Column, Format
from pagedopt.system.copies import Copy


def test_parameters_of_two_dtypes_that_share_a_step_count_take_it_in_their_order() -> None:
    """As in torch's loop, and as before launches were sorted."""

    def run(cls: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        large = torch.nn.Parameter(torch.zeros(1000))
        small = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
        optimizer = cls([large, small], lr=0.1, weight_decay=0.0, **options)
        for number in range(4):
            for p in (large, small):
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
            if not number:
                optimizer.state[small]["step"] = optimizer.state[large]["step"]
        return large.detach(), small.detach()

    for ours, theirs in zip(run(PagedAdamW), run(torch.optim.AdamW, foreach=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Means(Format):
    """A mean for each 64 elements, and nothing for each of them."""

    name: str = "means of 64"
    columns: tuple[Column, ...] = (Column("mean", torch.float32, 64),)
    block: int = 64
    cuda_type: str = "Means"
    cuda_text: str = "struct Means {};"
    numba_load: str = "for i in range(live):\n    x[i] = S(mean[0])\n"
    numba_store: str = (
        "total = np.float32(0)\nfor i in range(live):\n    total += np.float32(x[i])\n"
        "mean[0] = total / np.float32(live)\n"
    )

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = torch.nn.functional.pad(values.float(), (0, -len(values) % 64))
        return (padded.view(-1, 64).mean(1),)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        return columns[0].repeat_interleave(64)[:numel]


@pytest.mark.parametrize("numel", [100, 128])
def test_nothing_is_written_behind_a_parameter_that_was_cut_down(numel: int) -> None:
    memory, gradient = torch.zeros(numel), torch.ones(numel)
    cut, other = torch.nn.Parameter(memory[:]), torch.nn.Parameter(torch.zeros(50))
    optimizer = PagedAdamW([cut, other], lr=0.1, state_format=Means(), device_budget=0)
    cut.grad, other.grad = gradient, torch.ones(50)
    optimizer.step()
    behind = memory[70:].clone()
    cut.data = cut.data[:70]
    cut.grad = gradient[:70]
    optimizer.step()
    assert torch.equal(memory[70:], behind)


@pytest.mark.parametrize("nbytes", [1 << 31, (1 << 31) + 512])
def test_a_single_large_range_can_be_a_node(nbytes: int) -> None:
    pytest.importorskip("cuda.bindings.driver")
    p = Copy(1 << 40, 1 << 41, nbytes).parameters()
    assert p.WidthInBytes <= min(p.srcPitch, p.dstPitch)
    assert max(p.srcPitch, p.dstPitch) < 1 << 31
