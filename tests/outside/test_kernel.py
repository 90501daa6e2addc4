"""The kernels of one's own that notes/extending.md links: what they write, and that autograd hears of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import kernel_texts
import pytest
import torch
from children import python
from gpu_support import DEVICES, NEEDED

from .kernel import BLOCKS, CUDA, scale_into


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(3, 0, 4097), (), (1,) * (2 * BLOCKS + 1), (300_001,)], ids=lambda s: f"{len(s)}")
def test_every_element_is_written_once(sizes: tuple[int, ...], device: str) -> None:
    sources = [torch.randn(n, device=device) for n in sizes]
    targets = [torch.full_like(t, 7.0) for t in sources]
    scale_into(sources, targets, 2.0)
    scale_into(targets, sources, 0.25)
    assert all(torch.equal(t, 4 * s) for s, t in zip(sources, targets, strict=True))
    assert all(bool(s.any()) for s in sources if s.numel())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDED)])
def test_it_runs_on_the_stream_that_torch_is_on(device: str) -> None:
    source, target = (torch.zeros(1 << 20, device=device) for _ in range(2))
    work = torch.randn(4096, 4096, device=device)
    scale_into([source], [target], 2.0)  # compiled before anything is to be late
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            work = (work @ work).tanh()
        source.fill_(3.0)
        scale_into([source], [target], 2.0)
        torch.cuda.current_stream().synchronize()
    assert target.unique().tolist() == [6.0]


@pytest.mark.parametrize("device", DEVICES)
def test_autograd_notices_what_was_overwritten(device: str) -> None:
    weight = torch.ones(5, device=device, requires_grad=True)
    seen = torch.ones(5, device=device)
    loss = (weight * seen).sum()
    scale_into([torch.ones(5, device=device)], [seen], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nvrtc_takes_the_text() -> None:
    library = kernel_texts.nvrtc()
    error, program = library.nvrtcCreateProgram(CUDA.encode(), b"scale_into.cu", 0, [], [])
    assert error == 0
    with ThreadPoolExecutor(1) as own:  # NVRTC 12.4 leaves its thread in another locale
        assert own.submit(library.nvrtcCompileProgram, program, 0, []).result()[0] == 0


def test_the_name_of_the_pointer_costs_nothing_until_it_is_used() -> None:
    program = (
        "import sys, pagedopt.kernels as k; assert dir(k) == ['pointer']; assert 'numba' not in sys.modules; "
        "k.pointer; assert 'numba' in sys.modules"
    )
    python("-c", program, fresh=True)
