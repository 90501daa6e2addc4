"""The policy: what stays, what passes through.  Replayed on plain values, with no device."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pagedopt.paging.budget import ALL, Budget
from pagedopt.paging.pages import GRANULE, lay_out
from pagedopt.paging.policy import (
    AUTO_MIN,
    SLOTS,
    auto_is_due,
    reserve,
    resident_pages,
    schedule,
    spare_bytes,
    worth_moving,
)

MIB, GIB = 1 << 20, 1 << 30

#: Bytes of the pages of several arenas; an arena may have none, a page none either (a rule without state).
ARENAS = st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=5)


def arrays(arenas: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sizes, np.int64) for sizes in arenas]


def resident_bytes(arenas: list[list[int]], boundaries: list[int]) -> int:
    return sum(sum(sizes[:stay]) for sizes, stay in zip(arenas, boundaries, strict=True))


# ---- resident pages ----


@given(ARENAS, st.integers(0, 600))
@example([[10, 10], [1]], 15)
@example([[], [3]], 3)
def test_never_over_budget_and_never_a_page_less_than_it_allows(arenas: list[list[int]], budget: int) -> None:
    boundaries = resident_pages(arrays(arenas), Budget(budget))
    used = resident_bytes(arenas, boundaries)
    assert used <= budget
    left_out = [sizes[stay] for sizes, stay in zip(arenas, boundaries, strict=True) if stay < len(sizes)]
    if left_out:
        assert used + left_out[0] > budget, "the next page would still fit"


@given(ARENAS, st.integers(0, 600), st.integers(0, 600))
@example([[10], [6, 6]], 9, 10)
def test_a_larger_budget_keeps_what_a_smaller_one_keeps(arenas: list[list[int]], one: int, other: int) -> None:
    """So a change of budget moves pages one way only."""
    small, large = (resident_pages(arrays(arenas), Budget(budget)) for budget in sorted((one, other)))
    assert all(a <= b for a, b in zip(small, large, strict=True))


@given(ARENAS, st.integers(0, 600))
def test_first_pages_first_across_arenas(arenas: list[list[int]], budget: int) -> None:
    """Behind the first page that goes away none with bytes stays."""
    boundaries = resident_pages(arrays(arenas), Budget(budget))
    cut_off = [stay < len(sizes) for sizes, stay in zip(arenas, boundaries, strict=True)]
    if True in cut_off:
        behind = cut_off.index(True) + 1
        assert resident_bytes(arenas[behind:], boundaries[behind:]) == 0


@given(ARENAS)
def test_no_budget_is_no_limit(arenas: list[list[int]]) -> None:
    everything = [len(sizes) for sizes in arenas]
    for budget in (ALL, Budget(sum(map(sum, arenas))), Budget(2**70)):
        assert resident_pages(arrays(arenas), budget) == everything


def test_hand_cases_of_place() -> None:
    arenas = arrays([[4, 4, 2], [3, 3], [1]])
    # Of 9 the page of 1 would fit, but stands behind those that do not.
    want = {0: [0, 0, 0], 4: [1, 0, 0], 9: [2, 0, 0], 10: [3, 0, 0], 13: [3, 1, 0], 16: [3, 2, 0], 17: [3, 2, 1]}
    assert {budget: resident_pages(arenas, Budget(budget)) for budget in want} == want
    assert resident_pages([], Budget(5)) == []


def test_pages_of_a_vast_layout_are_placed() -> None:
    layout = lay_out([2**40, 2**31 + 5], (4, 4), GRANULE)
    sizes = layout.page_bytes()
    [half] = resident_pages([sizes], Budget(layout.nbytes // 2))
    assert half == layout.pages // 2
    assert sizes[:half].sum() > 2**41


# ---- schedule ----


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), unique=True, max_size=40), st.integers(1, 6))
def test_every_page_passes_once_and_no_slot_is_taken_while_in_use(pages: list[tuple[int, int]], slots: int) -> None:
    """A slot is free again when ``slots`` moves later its page has been evicted."""
    moves = schedule(pages, slots)
    assert [(move.arena, move.page) for move in moves] == pages
    in_flight: list[int] = []
    for move in moves:
        assert 0 <= move.slot < slots
        assert move.slot not in in_flight, "fetched into a slot that is in use"
        in_flight = [*in_flight, move.slot][-(slots - 1) :] if slots > 1 else []


def test_the_ring_has_a_slot_for_each_way_and_one_of_slack() -> None:
    assert [move.slot for move in schedule([(0, page) for page in range(6)])] == [0, 1, 2, 3, 0, 1]
    assert SLOTS == 4
    assert schedule([]) == []


# ---- auto ----


def test_a_twentieth_stays_free_and_never_less_than_a_quarter_gibibyte() -> None:
    assert reserve(140 * GIB) == 7 * GIB
    assert reserve(GIB) == AUTO_MIN == 256 * MIB
    assert reserve(5 * GIB) == 256 * MIB
    assert reserve(6 * GIB) > 256 * MIB


def test_auto_gives_state_what_nobody_needs() -> None:
    """A card of 100 GiB, of which 5 stay free."""
    card = 100 * GIB
    assert spare_bytes(card, ours=0, free=40 * GIB, cached=0, growth=0) == 35 * GIB
    # What state has now counts as its own.
    assert spare_bytes(card, ours=10 * GIB, free=30 * GIB, cached=0, growth=0) == 35 * GIB
    # The peak lies 8 GiB above what is in use now: 3 of them are cached already.
    assert spare_bytes(card, ours=10 * GIB, free=30 * GIB, cached=3 * GIB, growth=8 * GIB) == 30 * GIB
    # A cache larger than the growth is not taken from torch.
    assert spare_bytes(card, ours=10 * GIB, free=30 * GIB, cached=9 * GIB, growth=8 * GIB) == 35 * GIB
    # A cap of 40 GiB leaves 2 of them free, whatever the card has.
    assert spare_bytes(40 * GIB, ours=10 * GIB, free=20 * GIB, cached=0, growth=0) == 28 * GIB
    # Nothing is left: never less than none.
    assert spare_bytes(card, ours=GIB, free=2 * GIB, cached=0, growth=GIB) == 0


def test_auto_looks_often_at_first() -> None:
    assert [step for step in range(1, 300) if auto_is_due(step)] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def test_auto_gives_room_back_at_once_and_takes_it_only_when_it_pays() -> None:
    moves = {(500, 499): True, (500, 500): False, (500, 550): False, (500, 551): True, (0, 51): True}
    # The last pages are worth it however few they are; once all are there, nothing is to be gained.
    moves |= {(990, 1000): True, (990, 999): False, (1000, 1020): False}
    assert {(now, wanted): worth_moving(now=now, wanted=wanted, total=1000) for now, wanted in moves} == moves
    assert not worth_moving(now=0, wanted=0, total=0)
