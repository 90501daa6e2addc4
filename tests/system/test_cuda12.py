"""CUDA 12: what its bindings do not name is asked by number, and a stand-in without room gives way to the next."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import mmap
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_support import count_held

from pagedopt.paging.budget import Budget
from pagedopt.placements import choose
from pagedopt.system import driver, graphs, warn
from pagedopt.system.copies import Copy
from pagedopt.system.driver import Calls, CudaError
from pagedopt.system.look import compiled_look

CUDA = torch.device("cuda:0")
HOST_PAGES = 145

#: The attributes that the bindings of CUDA 12 name, and what those of 13 add.
KNOWN = {
    "CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY": 19,
    "CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY": 83,
    "CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS": 89,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
}
NEW = {"CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": HOST_PAGES}


class Result(enum.IntEnum):
    """What a driver call returns first."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_UNKNOWN = 999


class FakeDriver:
    """The part of ``cuda.bindings.driver`` that finds out what a device can do, and allocates.

    Args:
        bindings: "12.8" has no enum member 145 and takes ``attribute.value``, "12.9" takes ``int(attribute)``, "13"
            has the member.
        answer: to the attribute with number 145; an error, or 0 or 1.
    """

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, bindings: str, answer: Result | int) -> None:
        names = KNOWN | NEW if bindings == "13" else KNOWN
        self.CUdevice_attribute = enum.IntEnum("CUdevice_attribute", names)
        self._number = int if bindings == "12.9" else (lambda attribute: attribute.value)
        self._answer = answer

    def cuDeviceGet(self, index: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetAttribute(self, attribute: Any, handle: int) -> tuple[Result, int | None]:
        answer = self._answer if self._number(attribute) == HOST_PAGES else 1
        return (answer, None) if isinstance(answer, Result) else (Result.CUDA_SUCCESS, answer)

    def cuGetErrorString(self, code: int) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"as asked for"

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, mode


def install(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver, "capabilities", functools.cache(driver.capabilities.__wrapped__))


@pytest.mark.parametrize("bindings", ["12.8", "12.9", "13"])
def test_host_pages_are_what_the_driver_says(bindings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, can in ((1, True), (0, False), (Result.CUDA_ERROR_INVALID_VALUE, False)):
        install(FakeDriver(bindings, answer), monkeypatch)
        assert driver.capabilities(0) == driver.Capabilities(True, True, True, host_pages=can)
    install(FakeDriver(bindings, Result.CUDA_ERROR_UNKNOWN), monkeypatch)
    with pytest.raises(driver.CudaError, match=r"cuDeviceGetAttribute failed with CUDA_ERROR_UNKNOWN: as asked for"):
        driver.capabilities(0)


# ---- the bindings that are installed, over a library in the driver's place ----


# ---- stand-ins ----


class Host:
    """Memory of the host in the place of page-locked memory."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.host = np.full(nbytes, 0xAD, np.uint8)


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with 1 MB free, so with a quarter of that for managed memory, and an older driver."""
    install(FakeDriver("12.8", Result.CUDA_ERROR_INVALID_VALUE), monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1_000_000, 2_000_000))
    monkeypatch.setattr(driver, "allocate_mapped", Host)
    monkeypatch.setattr(driver, "as_tensor", lambda buffer: torch.from_numpy(buffer.host))
    monkeypatch.setattr(warn, "_said", set())


def test_a_stand_in_without_room_gives_way_to_the_next(small_card: None) -> None:
    with pytest.warns(RuntimeWarning, match=r"cannot map host pages.*driver of CUDA 13.*placement 'host'"):
        arena = choose.create([100_000], [4, 4], CUDA, "mapped", Budget(0))
    assert arena is not None
    assert (arena.name, bool(arena.tensor.any())) == ("host", False)


# --- calls of the driver that are made in one: their order, and the first that is refused -----------------------------


THREE = [("cuStreamWaitEvent", 1, 2, 0), ("cuMemcpyAsync", 3, 4, 5, 1), ("cuEventRecord", 6, 1)]


@pytest.mark.parametrize("refused", [None, 0, 1, 2])
def test_they_are_made_in_order_up_to_the_first_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """Where nothing is compiled."""
    made: list[Any] = []

    def call(name: str, *given: int) -> None:
        if len(made) == refused:
            raise CudaError(name, "CUDA_ERROR_UNKNOWN", "says the test")
        made.append((name, *given))

    monkeypatch.setattr(driver, "extension_with_driver", lambda: None)
    monkeypatch.setattr(driver, "call", call)
    ours = Calls(THREE)
    if refused is None:
        ours()
    else:
        with pytest.raises(CudaError, match=THREE[refused][0]):
            ours()
    assert made == THREE[:refused]


class Compiled:
    """An extension whose calls are refused from one on."""

    def __init__(self, refused: int) -> None:
        self.refused, self.asked = refused, 0

    def Calls(self, given: Any) -> Any:  # as the extension has it
        assert given == tuple(THREE)
        self.asked += 1
        return self

    def make(self) -> tuple[int, int]:
        return self.refused, 0 if self.refused == len(THREE) else 1


@pytest.mark.parametrize("refused", [0, 2, 3])
def test_the_compiled_ones_say_which_was_refused(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    compiled, said = Compiled(refused), list[Any]()
    monkeypatch.setattr(driver, "extension_with_driver", lambda: compiled)
    monkeypatch.setattr(driver, "check_code", lambda name, code: said.append((name, code)))
    ours = Calls(THREE)
    ours()
    ours()
    assert said == ([] if refused == 3 else 2 * [(THREE[refused][0], 1)])
    assert compiled.asked == 1


def test_a_call_that_there_is_not() -> None:
    """The compiled extension looks for it when the calls are given."""
    if (extension := compiled_look(wait=True)) is None:
        pytest.skip("there is no compiler")
    with pytest.raises(ValueError, match="no such call of the driver: cuNothing"):
        extension.Calls([("cuNothing", 1)])


def test_a_copy_of_several_ranges_is_a_call_for_each() -> None:
    copy = Copy(1000, 5000, 16, ranges=3, target_gap=100, source_gap=32)
    assert copy.calls(7) == [("cuMemcpyAsync", 1000 + 100 * i, 5000 + 32 * i, 16, 7) for i in range(3)]


# --- what a graph keeps alive: the destructor, called as CUDA calls it, lets go of it at the next call ----------------


class Kept:
    """Something that can be watched."""


def destroyed(held: graphs.Held) -> None:
    """Run the destructor on another thread, as the driver does."""
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(graphs.destructor())
    thread = threading.Thread(target=run, args=(held.address,))
    thread.start()
    thread.join()


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> list[graphs.Held]:
    held: list[graphs.Held] = []
    monkeypatch.setattr(graphs, "_held", held)
    for _ in range(3):
        graphs.hold(Kept())
    return held


def test_what_is_held_lives_until_the_graph_is_gone(holding: list[graphs.Held]) -> None:
    seen = [weakref.ref(held.kept) for held in holding]
    assert count_held() == 3
    gone = holding[1]
    assert not gone.released
    destroyed(gone)
    assert gone.released
    assert [watch() is None for watch in seen] == [False, False, False], "the destructor itself frees nothing"
    graphs.drop_released()
    assert [watch() is None for watch in seen] == [False, True, False]
    assert count_held() == 2
    assert gone not in holding


def test_what_lets_go_may_capture_and_let_go_itself(holding: list[graphs.Held]) -> None:
    class Nested:
        def __del__(self) -> None:
            graphs.drop_released()
            graphs.hold(Kept())

    holding[0].kept = Nested()
    destroyed(holding[0])
    graphs.drop_released()
    assert len(holding) == 3


def test_a_semaphore_outlives_whoever_waits_for_it(holding: list[graphs.Held]) -> None:
    watch, held = weakref.ref(holding[0].kept), holding[0]
    before = sys.getrefcount(held)
    destroyed(held)
    graphs.drop_released()
    assert watch() is None
    assert sys.getrefcount(held) == before - 2, "the list's reference, and the one that outlives it"


# --- managed memory stands in pages of its own, though the driver puts small allocations beside each other ------------


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
