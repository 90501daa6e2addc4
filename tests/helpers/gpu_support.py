"""What tests on a GPU share."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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
