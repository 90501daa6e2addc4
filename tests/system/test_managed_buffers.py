"""Managed memory stands in pages of its own, though the driver puts small allocations beside each other."""

from __future__ import annotations

import contextlib
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedopt.system import driver

PAGE = mmap.PAGESIZE


class Driver:
    """Gives managed memory out of one block, 256 bytes apart at least, as CUDA does with small allocations."""

    CUmemAttach_flags = SimpleNamespace(CU_MEM_ATTACH_GLOBAL=1)

    def __init__(self) -> None:
        self._block = np.zeros(4 << 20, np.uint8)
        self._next = -(-self._block.ctypes.data // 256) * 256
        self.given: dict[int, int] = {}
        self.freed: list[int] = []

    def cuMemAllocManaged(self, nbytes: int, flag: int) -> tuple[int, int]:
        """One after the other."""
        address, self._next = self._next, self._next + -(-nbytes // 256) * 256
        self.given[address] = nbytes
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        """Only noted."""
        self.freed.append(address)
        return (0,)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(driver, "bindings", lambda: found)
    monkeypatch.setattr(driver, "check", lambda call, result, hint="": result[1] if result[1:] else None)
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    return found


def pages(buffer: driver.Buffer) -> set[int]:
    return set(range(buffer.address // PAGE, (buffer.address + buffer.nbytes - 1) // PAGE + 1))


@pytest.mark.parametrize("sizes", [(248,) * 28, (24_056,) * 8, (1, PAGE, PAGE + 1, 100), (driver.BLOCK, 8, 8)])
def test_no_two_share_a_page(fake: Driver, sizes: tuple[int, ...]) -> None:
    fake.cuMemAllocManaged(300, 1)  # somebody else's
    buffers: list[Any] = [driver.allocate_managed(size, 0) for size in sizes]
    assert [buffer.nbytes for buffer in buffers] == list(sizes)
    seen: set[int] = set()
    for buffer, (base, asked) in zip(buffers, list(fake.given.items())[1:], strict=True):
        if buffer.nbytes < driver.BLOCK:  # the driver aligns what is larger
            assert buffer.address % PAGE == 0
            assert base <= buffer.address
            assert max(pages(buffer)) * PAGE + PAGE <= base + asked, "its last page is its own, too"
            assert not seen & pages(buffer)
            seen |= pages(buffer)
        buffer.host[:] = 1


def test_what_was_given_is_freed(fake: Driver) -> None:
    buffer = driver.allocate_managed(248, 0)
    del buffer
    assert fake.freed == list(fake.given)


def test_beyond_a_share_of_what_is_free_it_is_refused(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 40))
    with pytest.raises(MemoryError, match=r"262,145 bytes of managed memory asked for on cuda:0, .* the limit is 25%"):
        driver.allocate_managed((1 << 18) + 1, 0)
    assert not fake.given
    driver.allocate_managed(1 << 18, 0)
