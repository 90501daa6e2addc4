"""What tests on a GPU share: devices, what the card has left, and parameters large enough for several pages."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_support import ADAMW
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from pagedopt import PagedAdamW
from pagedopt.system import graphs

NEEDED = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDED)]


@pytest.fixture(autouse=True)
def deterministic_attention() -> Iterator[None]:
    """Attention's other backwards on a GPU add in an order that differs from run to run."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def launching() -> pytest.MarkDecorator:
    """The mark of a module whose tests launch kernels; all of it is skipped where none can be launched."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False", allow_module_level=True)
    pytest.importorskip("cupy", reason="needs CuPy to launch kernels")
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    return pytest.mark.gpu


def count_held() -> int:
    """How many objects captured graphs keep alive; those of graphs that are gone are let go first."""
    graphs.drop_released()
    return len(graphs._held)


def settled() -> None:
    """All work has ended, and torch has given back what it does not use."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def no_synchronizing() -> Iterator[None]:
    """A block in which torch refuses to wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def all_of_the_card_in_the_end() -> Iterator[None]:
    """A block in which limits of torch's memory may be set; behind it there is none."""
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def assert_clean() -> None:
    """All work has ended without an error, none is kept for the next who asks, and the device computes."""
    torch.cuda.synchronize()
    for path in _runtimes():
        code = ctypes.CDLL(path).cudaGetLastError()  # of this thread; asking clears it
        assert code == 0, f"{path} keeps the error {code}"
    assert float(torch.ones(3, device="cuda").sum()) == 3


def _runtimes() -> set[str]:
    """The CUDA runtimes that this process has loaded: that of torch, and perhaps that of CuPy."""
    words = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return {word[-1] for word in words if "/libcudart" in word[-1]}


def least(taken: Callable[[], int], enough: int, attempts: int = 4) -> int:
    """The least number of bytes that ``taken`` reports, asked again while it is above ``enough``.

    Free memory of a card or of a machine says nothing of who took it: another program's context is half a gigabyte.
    That comes now and then; what the code under test leaks, it leaks in every attempt.
    """
    found = []
    for _ in range(attempts):
        found.append(taken())
        if found[-1] <= enough:
            break
    return min(found)


Params = list[torch.nn.Parameter]
#: Odd sizes, one larger than a page, one of a single element, one of none: 6.3 M elements, 48 MiB of AdamW state.
SHAPES = ((3, 700_001), (1,), (0, 5), (1024, 1024), (17,), (2_000_003,), (1200, 900), (33, 3))


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0, shapes: Any = SHAPES) -> Params:
    """Parameters on the GPU, the same for the same seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(*shape, device="cuda", generator=generator).to(dtype).requires_grad_(False))
        for shape in shapes
    ]


def steps(params: Params, opt: Optimizer, count: int, first: int = 0, gaps: bool = True) -> None:
    """Steps on gradients that depend on the step; every third step one parameter, every fifth the largest, has none."""
    for step in range(first, first + count):
        generator = torch.Generator("cuda").manual_seed(1000 + step)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype)
            absent = gaps and ((step % 3 == 2 and i == step % len(params)) or (step % 5 == 4 and i == 0))
            p.grad = None if absent else grad
        opt.step()


def trained(
    count: int, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, gaps: bool = True, **options: Any
) -> tuple[Params, PagedAdamW]:
    """Such parameters and their optimizer after ``count`` steps."""
    params = parameters(dtype, shapes=shapes)
    opt = PagedAdamW(params, **ADAMW, **options)
    steps(params, opt, count, gaps=gaps)
    return params, opt


def everything(params: Params, opt: Optimizer) -> list[torch.Tensor]:
    """Copies on the CPU of parameters and state."""
    tensors = list(params) + [v for p in params for v in opt.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [t.detach().cpu().clone() for t in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
