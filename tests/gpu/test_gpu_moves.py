"""Arenas on a card: moves that are cut off lose nothing, and each state tensor has a storage of its own."""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from injector import interrupt_at

from pagedopt.paging.pages import GRANULE, lay_out
from pagedopt.placements.arena import Arena
from pagedopt.placements.managed import ManagedArena
from pagedopt.placements.mapped import MappedArena
from pagedopt.placements.plain import PinnedArena
from pagedopt.system import driver

pytestmark = NEEDED

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1000, 1000), (), (0, 3), (7,), (1 << 20,), (333, 77))
#: So many lines are passed over between two that get a signal.
STRIDE = 1 if os.environ.get("PAGEDOPT_EVERY_LINE") else 53
KINDS = [MappedArena, ManagedArena, PinnedArena]


def arena(kind: type[Arena], resident: int) -> Arena:
    device = torch.device("cuda", torch.cuda.current_device())
    if refusal := kind.refusal(device):
        pytest.skip(f"{kind.name}: {refusal}")
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    layout = lay_out(numels, [dtype.itemsize for dtype in DTYPES], kind.granule, GRANULE)
    return kind(layout, device, resident)


def views(made: Arena) -> list[torch.Tensor]:
    like = [torch.zeros(shape, device="cuda") for shape in SHAPES]
    return [made.view(s, i, t, dtype) for s, dtype in enumerate(DTYPES) for i, t in enumerate(like)]


def fill(made: Arena) -> torch.Tensor:
    made.tensor.view(torch.int32).copy_(torch.arange(made.tensor.nbytes // 4, dtype=torch.int32, device="cuda"))
    return made.tensor.clone()


def assert_counted(made: Arena, want: torch.Tensor) -> None:
    assert torch.equal(made.tensor, want)
    assert made.measured() == made.planned()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize(("first", "target"), [(0, 2), (2, 0)])
def test_a_signal_at_any_line_of_a_move_loses_nothing(first: int, target: int, number: int) -> None:
    for at in itertools.count(1 + number % STRIDE, STRIDE):
        made = arena(MappedArena, first)
        want = fill(made)
        outcome = interrupt_at(at, number, lambda: made.move(target))  # noqa: B023
        assert bool(outcome.error or outcome.unraisable) == bool(outcome.shots)
        assert_counted(made, want)
        made.move(1)
        assert_counted(made, want)
        if not outcome.shots:
            break
    assert at > 3 * STRIDE, "this interrupts nothing"


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyAsync"])
@pytest.mark.parametrize(("first", "target"), [(0, 2), (2, 0)])
def test_any_call_of_a_move_may_fail(first: int, target: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused in the driver's stead, by a call that is sure to fail."""
    real_driver = driver.bindings()
    real, refusals = getattr(real_driver, name), 0
    refused = real_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
    for at in itertools.count():
        made = arena(MappedArena, first)
        want = fill(made)
        calls = itertools.count()

        def call(*arguments: Any) -> Any:
            return refused if next(calls) == at else real(*arguments)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(real_driver, name, call)
            try:
                made.move(target)
                failed = False
            except (driver.CudaError, MemoryError, torch.OutOfMemoryError):  # and not StateLost
                failed = True
        assert_counted(made, want)
        made.move(1)
        assert_counted(made, want)
        refusals += failed
        if not failed:
            break
    assert refusals >= 4, "two pages of two sections make more"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("resident", [0, 1])
def test_a_state_tensor_has_a_storage_of_exactly_its_bytes(kind: type[Arena], resident: int) -> None:
    made = arena(kind, resident)
    found = views(made)
    for number, tensor in enumerate(found):
        assert not tensor.any()
        assert tensor.shape == SHAPES[number % len(SHAPES)]
        assert tensor.dtype == DTYPES[number // len(SHAPES)]
        assert tensor.is_contiguous()
        assert not tensor._is_view()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.device == made.device
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(found))
    begin = made.tensor.data_ptr()
    assert all(begin <= t.data_ptr() < begin + made.tensor.nbytes for t in found if t.numel())
    paged, plain = io.BytesIO(), io.BytesIO()
    torch.save(found[3], paged)
    torch.save(found[3].clone(), plain)
    assert len(paged.getvalue()) == len(plain.getvalue())
    if kind.paged:
        made.move(made.layout.pages - resident)
        assert all((tensor == number + 1).all() for number, tensor in enumerate(found))


@pytest.mark.exclusive
def test_the_range_goes_with_its_last_tensor() -> None:
    torch.zeros(1, device="cuda")
    made = arena(MappedArena, 99)
    found = views(made)
    found[4].fill_(3)
    kept, nbytes = found[4], made.layout.nbytes
    gc.collect()
    torch.cuda.synchronize()
    held = torch.cuda.mem_get_info()[0]
    del made, found
    gc.collect()
    assert torch.cuda.mem_get_info()[0] <= held + (1 << 20)
    assert (kept == 3).all()
    torch.cuda.synchronize()
    held = torch.cuda.mem_get_info()[0]
    del kept
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= held + nbytes - (1 << 20)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_late_joiners_find_zeros(kind: type[Arena]) -> None:
    made = arena(kind, 1)
    for tensor in views(made):
        tensor.fill_(1)
    if kind.paged:
        made.move(0)
        made.move(made.layout.pages)
    (index,) = made.extend([5]) or [None]
    assert index == len(SHAPES)
    joined = [made.view(s, index, torch.zeros(5, device="cuda"), dtype) for s, dtype in enumerate(DTYPES)]
    assert not any(t.any() for t in joined)
    assert all((tensor == 1).all() for tensor in views(made))
