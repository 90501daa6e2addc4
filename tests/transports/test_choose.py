"""Which transport serves where: what a device can do, what it refuses, and what stands in."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from pagedopt.system.driver import Capabilities
from pagedopt.transports.choose import TRANSPORTS, choose, create, shared
from pagedopt.transports.ring import RING_SIZE, MemcpyTransport
from tests.card.tables import REFUSED, Tables, filled


@pytest.mark.parametrize("has", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_choice_by_capabilities(name: str, has: tuple[bool, bool, bool]) -> None:
    managed, concurrent, mapped = has
    chosen, reason = choose(name, Capabilities(managed, concurrent, mapped))
    if name == "managed" and not (managed and concurrent):
        assert chosen == ("mapped" if mapped else "memcpy")
        assert "concurrentManagedAccess = 0" in reason
    elif name == "mapped" and not mapped:
        assert chosen == "memcpy"
        assert "canMapHostMemory = 0" in reason
    else:
        assert (chosen, reason) == (name, "")


def test_without_concurrent_access_managed_memory_is_never_touched(cuda: Tables) -> None:
    cuda.card.driver.lacks = ("CONCURRENT_MANAGED",)
    with pytest.warns(RuntimeWarning, match=r"cuda:0 cannot use 'managed' .* Using 'mapped'; results are the same"):
        way = create("managed", 0)
    assert way.name == "mapped"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert create("managed", 0).name == "mapped"  # said once, not for every optimizer
    with pytest.warns(RuntimeWarning, match="cuda:1 cannot"):
        create("managed", 1)
    cuda.run_changed(way, filled([5, 3000]), RING_SIZE + 1)
    cuda.drain(7)
    assert not {"cuMemAllocManaged", "cuMemAdvise", "cuMemPrefetchAsync"} & set(cuda.card.driver.calls)


@pytest.mark.parametrize(
    ("refused", "asked", "chosen"),
    [
        (["managed"], "managed", "mapped"),
        (["managed", "mapped"], "managed", "memcpy"),
        (["mapped"], "mapped", "memcpy"),
        (["mapped"], "managed", "managed"),
        (["managed"], "mapped", "mapped"),
        (["managed", "mapped"], "struct", "struct"),
    ],
)
def test_refused_memory_falls_back_with_one_warning(cuda: Tables, refused: list[str], asked: str, chosen: str) -> None:
    cuda.refuse(*refused)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert create(asked, 0).name == chosen
        way = create(asked, 0)
        assert way.name == chosen
    assert len(said) == (asked != chosen)
    for warning in said:
        assert "CUDA_ERROR_NOT_SUPPORTED" in str(warning.message)
        assert f"Using {chosen!r}" in str(warning.message)
        assert warning.category is RuntimeWarning
    if chosen != "struct":
        table = filled([5, 3000])
        cuda.run(way, table, 7)  # and what was chosen needs nothing that was refused
        cuda.drain(7)


def test_a_device_is_asked_once_what_works_on_it(cuda: Tables) -> None:
    for _ in range(3):
        assert create("managed", 0).name == "managed"
    assert cuda.count("managed") == 1
    create("managed", 1)
    assert cuda.count("managed") == 2


class Own(MemcpyTransport):
    pass


def test_a_class_is_made_for_each_device_and_nothing_stands_in(cuda: Tables) -> None:
    cuda.refuse(*REFUSED)
    ways = [create(Own, 0), create(Own, 1), create(Own, 0), shared(Own, 0), shared(Own, 1)]
    assert [(type(way), way.device) for way in ways] == [(Own, 0), (Own, 1), (Own, 0), (Own, 0), (Own, 1)]
    assert len(set(ways)) == 5
    assert shared(Own, 0) is ways[3]
    assert shared(ways[0], 0) is ways[0]
    assert cuda.allocations == 0


def test_what_is_in_memory_says_so(cuda: Tables) -> None:
    table = filled([5, 3000])
    for name, kind in TRANSPORTS.items():
        with kind(0).lend(table, 7) as lent:
            assert bool(lent.address) == kind.in_memory == (name not in ("struct", "hybrid"))


@pytest.mark.parametrize("take", [create, shared])
def test_what_is_no_transport_is_refused_with_those_there_are(take: Any) -> None:
    text = r"transport is \[\]; give a subclass of pagedopt.transports.Transport, or one of"
    with pytest.raises(TypeError, match=text):
        take([], 0)
    with pytest.raises(ValueError, match=r"transport is 'pigeon'; there are hybrid, managed, mapped, memcpy, struct"):
        take("pigeon", 0)
