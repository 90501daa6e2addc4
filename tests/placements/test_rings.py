"""Slots through which pages visit, on a device that is none: optimizers whose pages are alike have the same ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from file_support import CPU

from pagedopt.paging.budget import Budget
from pagedopt.placements import movers
from pagedopt.placements.store import Store, Wanted
from pagedopt.tables.storage import Column
from tests.card.card import Pages
from tests.card.driver import GRANULE, Driver

Kept = Callable[[list[tuple[int, ...]]], Store]


class Visited(Pages):
    """Its pages visit the card; of 4,096 elements in float32."""

    granule = 4 * GRANULE
    ways = ("staged",)


class Slots:
    """Bytes in the place of memory and streams."""

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self.device, self.slot_bytes = device, slot_bytes


@pytest.fixture
def kept(card: Driver, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Makes state in pages that are all away: of each parameter its elements, then an item size for each column."""
    monkeypatch.setattr(movers, "Ring", Slots)
    monkeypatch.setattr(movers, "_rings", {})
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    state = weakref.WeakKeyDictionary[Store, list[torch.Tensor]]()  # which an arena goes with

    def make(params: list[tuple[int, ...]]) -> Store:
        store = Store(Visited, Budget.parse(0), None)
        state[store] = []
        for numel, *sizes in params:
            p = torch.empty(numel)
            wanted = [Wanted(p, str(i), Column(str(i), dtypes[size])) for i, size in enumerate(sizes)]
            state[store] += store.create(wanted)
        return store

    return make


def test_those_whose_slots_are_alike_share_them(kept: Kept) -> None:
    pages = [[(9000, 4, 4)], [(20_000, 4, 4)], [(9000, 4, 4), (70, 4, 4)]]
    stores = [kept(one) for one in pages]
    rings = {id(store.ring(CPU)) for store in stores}
    assert len(rings) == 1
    assert stores[0].ring(CPU).slot_bytes == 2 * Visited.granule, "a page of each column"


def test_others_have_slots_of_their_own_and_nobody_changes_with_them(kept: Kept) -> None:
    pages = [[(9000, 4, 4)], [(9000, 4)], [(9000, 4, 2)], [(70, 4, 4)], [(9000, 4, 4, 4, 4)]]
    stores = [kept(one) for one in pages]
    rings = [store.ring(CPU) for store in stores]
    sizes = [ring.slot_bytes for ring in rings]
    assert len(set(sizes)) == len(sizes)
    assert sizes == [max(movers.slot_bytes(arena.layout) for arena in store.arenas) for store in stores]
    assert [store.ring(CPU) for store in stores] == rings
    assert movers.ring_for(torch.device("cuda:1"), sizes[0]) is not rings[0], "another device"


def test_who_needs_larger_slots_leaves_those_of_the_others(kept: Kept) -> None:
    one, other = kept([(9000, 4)]), kept([(9000, 4)])
    assert one.ring(CPU) is (before := other.ring(CPU))
    p = torch.empty(9000)
    state = one.create([Wanted(p, str(i), Column(str(i), torch.float32)) for i in range(2)])
    assert len(state) == 2
    assert one.ring(CPU).slot_bytes == 2 * before.slot_bytes
    assert other.ring(CPU) is before
    assert kept([(9000, 4)]).ring(CPU) is before


def test_slots_go_with_the_last_who_has_them(kept: Kept) -> None:
    one, other = kept([(9000, 4, 4)]), kept([(9000, 4, 4)])
    ring = weakref.ref(one.ring(CPU))
    assert other.ring(CPU) is ring()
    del one
    gc.collect()
    assert ring() is not None
    del other
    gc.collect()
    assert ring() is None
