"""State tensors are tensors like any other: each with a storage of its own, over memory that goes with the last."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from file_support import CPU, MIB, assert_measured, mapped, open_files

from pagedopt.paging.pages import lay_out
from pagedopt.placements.file import FileArena

SHAPES = ((300, 7), (1,), (), (0, 5), (64, 64), (5,))
LIKE = [torch.zeros(shape) for shape in SHAPES]
DTYPES = (torch.float32, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("folder")


def arena(like: list[torch.Tensor], resident: int = 0, dtypes: tuple[torch.dtype, ...] = DTYPES) -> FileArena:
    layout = lay_out([t.numel() for t in like], [d.itemsize for d in dtypes], FileArena.granule, FileArena.stretch)
    return FileArena(layout, CPU, resident)


def views(memory: FileArena, like: list[torch.Tensor], first: int = 0) -> list[torch.Tensor]:
    """Every state tensor, those of the first section before the others."""
    return [memory.view(s, first + i, t, dtype) for s, dtype in enumerate(DTYPES) for i, t in enumerate(like)]


@pytest.mark.parametrize("resident", [0, 1])
def test_a_state_tensor_has_a_storage_of_exactly_its_bytes(resident: int) -> None:
    memory = arena(LIKE, resident)
    found = views(memory, LIKE)
    for tensor, like in zip(found, LIKE * 2, strict=True):
        assert (tensor.shape, tensor.stride()) == (like.shape, like.stride())
        assert (tensor.untyped_storage().nbytes(), tensor.storage_offset()) == (tensor.nbytes, 0)
        assert (tensor.is_leaf, tensor._is_view(), bool(tensor.any())) == (True, False, False)
    assert [t.dtype for t in found] == [DTYPES[0]] * len(LIKE) + [DTYPES[1]] * len(LIKE)
    storages = [t.untyped_storage().data_ptr() for t in found if t.numel()]
    assert len(set(storages)) == len(storages)


def test_a_state_tensor_is_laid_out_as_its_parameter() -> None:
    like = torch.zeros(30, 20).t()
    memory = arena([like])
    state = memory.view(1, 0, like, torch.bfloat16)
    state.copy_(torch.arange(600).reshape(20, 30))
    assert state.stride() == (1, 20)
    flat = memory.tensor[memory.layout.sections[1] :][:1200].view(torch.bfloat16)
    assert torch.equal(flat, torch.arange(600).reshape(20, 30).t().reshape(-1).bfloat16())


@pytest.mark.parametrize("last", ["arena", "view"])
def test_the_range_goes_with_whatever_uses_it_last(folder: Path, last: str) -> None:
    gc.collect()
    before = open_files(folder), mapped(folder)
    memory = arena(LIKE)
    kept = memory.view(0, 4, LIKE[4], torch.float32).fill_(5)
    if last == "arena":
        del kept
        gc.collect()
        assert (memory.view(0, 4, LIKE[4], torch.float32) == 5).all()
        del memory
    else:
        del memory
        gc.collect()
        assert mapped(folder) > before[1]
        assert (kept == 5).all()
        del kept
    gc.collect()
    assert (open_files(folder), mapped(folder)) == before


def test_no_default_device_and_no_dtype_changes_what_is_made() -> None:
    memory = arena(LIKE)
    with torch.device("meta"):
        found = views(memory, LIKE)
    assert {t.device for t in found} == {CPU}
    assert [t.dtype for t in found] == [DTYPES[0]] * len(LIKE) + [DTYPES[1]] * len(LIKE)


# ---- late joiners ----


@pytest.mark.parametrize("resident", [0, 1])
def test_late_joiners_share_what_is_there(folder: Path, resident: int) -> None:
    memory = arena(LIKE, resident)
    before = open_files(folder), mapped(folder), memory.planned(), memory.tensor.data_ptr()
    for tensor in views(memory, LIKE):
        tensor.fill_(7)
    for number in range(100):
        more = [torch.zeros(10), torch.zeros(3, 2)]
        assert memory.extend([10, 6]) == [len(LIKE) + 2 * number, len(LIKE) + 2 * number + 1]
        joined = views(memory, more, len(LIKE) + 2 * number)
        assert not any(t.any() for t in joined)
        for tensor in joined:
            tensor.fill_(number)
        memory.move(number % 2)
        assert all((tensor == number).all() for tensor in joined)
    memory.move(resident)
    assert (open_files(folder), mapped(folder), memory.tensor.data_ptr()) == (*before[:2], before[3])
    assert all((tensor == 7).all() for tensor in views(memory, LIKE))
    assert memory.planned() == before[2]
    memory.drop()
    assert_measured(memory)


def test_an_arena_that_is_full_says_so_and_stays_as_it_was() -> None:
    memory = arena(LIKE)
    layout = memory.layout
    assert memory.extend([1, MIB]) is None
    assert memory.layout is layout


def test_joining_brings_nothing_into_memory() -> None:
    """Zeros of a page that is away are on the disk, as a hole."""
    like = [torch.zeros(MIB // 4)]
    layout = lay_out([MIB // 4], [4, 4], FileArena.granule, 64 << 10, spare=MIB)
    memory = FileArena(layout, CPU, 0)
    assert layout.pages == 24
    views_of = [memory.view(s, 0, like[0], torch.float32) for s in range(2)]
    for tensor in views_of:
        tensor.fill_(1)
    memory.drop()
    assert memory.extend([MIB // 8]) == [1]
    assert_measured(memory)
    memory.move(24)
    memory.move(20)
    joined = memory.view(1, 1, torch.zeros(MIB // 8), torch.float32)
    assert not joined.any()
    assert all((t == 1).all() for t in views_of)
