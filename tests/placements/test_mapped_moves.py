"""Moves of pages in CUDA's virtual memory, over memory of this system: whatever fails, a page keeps memory and bits."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from pagedopt.paging.pages import lay_out
from pagedopt.placements import device_page_limit
from pagedopt.placements.mapped import MappedArena
from pagedopt.system import driver, virtual
from pagedopt.system.driver import Location
from pagedopt.system.warn import StateLost
from tests.card.card import install_pages
from tests.card.driver import GRANULE, Driver, Result

CPU = torch.device("cpu")
NUMEL = 5 * GRANULE // 4  # five pages
FAILED = (driver.CudaError, MemoryError, torch.OutOfMemoryError)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Driver]]:
    """Makes a device whose memory is all free, in the place of the last."""
    monkeypatch.setattr(MappedArena, "granule", GRANULE)
    made: list[Driver] = []

    def make() -> Driver:
        made.append(install_pages(monkeypatch))
        return made[-1]

    yield make
    gc.collect()
    for fake in made:
        fake.close()


@pytest.fixture
def fake(fakes: Callable[[], Driver]) -> Iterator[Driver]:
    found = fakes()
    yield found
    gc.collect()
    assert not found.handles, "memory is lost"
    assert not found.ranges, "an address range is lost"


def arena(resident: int) -> MappedArena:
    """State in pages of a granule; it says that it is on a CPU, as the memory behind it is."""
    made = MappedArena(lay_out([NUMEL], [4, 4], GRANULE, GRANULE), torch.device("cpu", 0), resident)
    assert made.layout.pages == 5
    return made


def fill(made: MappedArena) -> torch.Tensor:
    made.tensor.view(torch.int32).copy_(torch.arange(2 * NUMEL, dtype=torch.int32))
    return made.tensor.clone()


def assert_counted(made: MappedArena, want: torch.Tensor, fake: Driver) -> None:
    """Every page has memory that can be read, on the side where it is counted."""
    assert torch.equal(made.tensor, want)
    inside = {at for at in fake.accessible if 0 <= at - made.tensor.data_ptr() < made.tensor.nbytes}
    assert len(inside) == 10
    assert made.measured() == {"device": 2 * GRANULE * made.resident, "host": 2 * GRANULE * (5 - made.resident)}


def assert_whole(made: MappedArena, want: torch.Tensor, fake: Driver) -> None:
    """And nothing else has memory."""
    assert_counted(made, want, fake)
    assert len(fake.handles) == len(fake.mapped) == len(fake.accessible) == 10
    assert list(fake.ranges) == [made.tensor.data_ptr()]


@pytest.mark.parametrize(("first", "target"), [(1, 4), (4, 1), (0, 5), (5, 0)])
def test_pages_move_at_their_addresses(fake: Driver, first: int, target: int) -> None:
    made = arena(first)
    assert not made.tensor.any()
    want, address = fill(made), made.tensor.data_ptr()
    made.move(target)
    assert (made.resident, made.tensor.data_ptr()) == (target, address)
    assert_whole(made, want, fake)


def leaks(fake: Driver, at: int) -> bool:
    """Whether the ``at``-th call was to give something back: what it concerns is there still, and all else is right."""
    name, *after = fake.calls[at : at + 2]
    return name in ("cuMemRelease", "cuMemAddressFree", "cuStreamSynchronize") or (
        name == "cuMemUnmap" and after == ["cuMemAddressFree"]
    )


@pytest.mark.parametrize(("first", "target"), [(1, 3), (3, 1)])
@pytest.mark.parametrize(
    ("fault", "errors"),
    [
        (Result.CUDA_ERROR_OUT_OF_MEMORY, FAILED),
        (Result.CUDA_ERROR_INVALID_VALUE, FAILED),
        (KeyboardInterrupt, (KeyboardInterrupt, driver.CudaError)),
    ],
)
def test_any_call_of_a_move_may_fail(
    fakes: Callable[[], Driver], first: int, target: int, fault: Any, errors: tuple[type[BaseException], ...]
) -> None:
    """Or raise: what was begun of a page is undone."""
    reached = set[int]()
    for at in itertools.count():
        gc.collect()  # the last one's end is no call of this one's move
        fake, made = fakes(), arena(first)
        want = fill(made)
        fake.calls.clear()
        fake.fail(at, fault() if fault is KeyboardInterrupt else fault)
        error = ""
        try:
            made.move(target)
        except errors as raised:
            error = type(raised).__name__
        fake.before = lambda name: None
        if not error:
            break
        name = fake.calls[at]
        if fault == Result.CUDA_ERROR_OUT_OF_MEMORY and name == "cuMemCreate":
            assert error == ("OutOfMemoryError" if target > first else "MemoryError")
        reached.add(made.resident)
        assert_counted(made, want, fake)
        if not leaks(fake, at):
            assert_whole(made, want, fake)
        for resident in (target, first):
            made.move(resident)
            assert torch.equal(made.tensor, want), name
        del made
    assert at > 20
    assert reached == set(range(min(first, target), max(first, target) + 1))


@pytest.mark.parametrize("at", range(3))
def test_memory_that_cannot_be_given_leaves_the_page_without(fake: Driver, at: int) -> None:
    pages = virtual.Range(2 * GRANULE, 0)
    fake.fail(at)
    with pytest.raises(driver.CudaError, match=r"^cuMem(Create|Map|SetAccess) failed"):
        pages.give(0, GRANULE, Location.DEVICE)
    fake.before = lambda name: None
    assert (fake.handles, fake.mapped, pages.bytes_at(Location.DEVICE)) == ({}, {}, 0)
    pages.give(0, GRANULE, Location.DEVICE)
    pages.give(GRANULE, GRANULE, Location.HOST)
    assert not pages.tensor().any()
    assert pages.bytes_at(Location.DEVICE) == pages.bytes_at(Location.HOST) == GRANULE


def test_pages_that_cannot_even_stay_are_named(fake: Driver) -> None:
    made = arena(3)
    fill(made)
    swapped = [False]

    def refuse(name: str) -> Result | None:
        swapped[0] |= name == "cuMemUnmap" and "cuMemAddressFree" in fake.calls[-2:]
        return Result.CUDA_ERROR_OUT_OF_MEMORY if swapped[0] and name == "cuMemMap" else None

    fake.before = refuse
    with pytest.raises(StateLost, match=r"4,096 bytes of optimizer state .* load a checkpoint"):
        made.move(2)
    assert made.resident == 3


def test_narrow_sections_move_with_the_first_page_of_their_granule(fake: Driver) -> None:
    """A byte an element, and a scale of four for every 64: sixteen pages have their scales in one granule."""
    layout = lay_out([20 * GRANULE], [1, Fraction(4, 64)], GRANULE, GRANULE)
    made = MappedArena(layout, torch.device("cpu", 0), 5)
    assert layout.pages == 20
    assert layout.page_bytes().tolist() == [2 * GRANULE, *[GRANULE] * 15, 2 * GRANULE, *[GRANULE] * 3]
    made.tensor.view(torch.int16).copy_(torch.arange(made.tensor.numel() // 2))
    want = made.tensor.clone()
    for resident in (0, 20, 16, 17, 1, 3, 0):
        made.move(resident)
        near, away = layout.divided(resident)
        assert made.measured() == {"device": near, "host": away}
        assert torch.equal(made.tensor, want)
    assert len(fake.handles) == len(fake.mapped) == 22


def test_a_limit_refuses_device_pages_as_a_full_card_does(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "device_pages", {})  # other tests lose memory on purpose
    made, others = arena(1), [0]
    want, page = fill(made), 2 * GRANULE
    with device_page_limit(3 * page, lambda: others[0]):
        made.move(3)
        for target, beside in ((4, 0), (5, 0), (4, page)):
            others[0] = beside
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                made.move(target)
            assert made.resident == 3
            assert_whole(made, want, fake)
        others[0] = page
        made.move(2)
        with device_page_limit(page), pytest.raises(torch.OutOfMemoryError):
            made.move(3)  # the outer limit leaves room for it, were nothing beside
        made.move(0)
    made.move(5)
    assert_whole(made, want, fake)
    del made
    gc.collect()
    assert not virtual.device_pages
    with pytest.raises(ValueError, match="nbytes is -1"), device_page_limit(-1):
        pass
