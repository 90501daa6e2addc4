"""What users say of how much stays: read once, refused in words, and divided between arenas."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedopt.common.units import parse_bytes
from pagedopt.paging.budget import ALL, Budget, Given
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

BYTES = [
    (0, 0),
    (123, 123),
    (2**70, 2**70),
    ("0", 0),
    ("123", 123),
    ("500 MB", 500 * 1000**2),
    ("2GiB", 2 * GIB),
    ("2gib", 2 * GIB),
    ("2Gi", 2 * GIB),
    ("2 G", 2 * 1000**3),
    (" 1.5 GB ", 1_500_000_000),
    ("0.5 KiB", 512),
    ("1.TB", 1000**4),
    ("3 TiB", 3 << 40),
    ("7b", 7),
    ("4kB", 4000),
    ("1.9b", 1),  # bytes are whole
    ("9007199254740993", 2**53 + 1),  # a float would lose the last one
    ("1" + "0" * 400, 10**400),  # and could not hold this
    (np.int64(2 * GIB), 2 * GIB),
    (np.uint64(2**63 + 1), 2**63 + 1),
    (np.uint8(200), 200),
]
WHOLE = [(2.0, 2), (1.5e9, 1_500_000_000), (2e9, 2 * 10**9), (2.0**70, 2**70)]


@pytest.mark.parametrize(("said", "nbytes"), BYTES)
def test_bytes_are_read(said: int | str, nbytes: int) -> None:
    assert parse_bytes(said) == nbytes
    budget = Budget(said)
    assert {type(parse_bytes(said)), type(budget.nbytes)} == {int}
    assert type(budget.said) in (int, str)  # it is pickled
    assert (budget.nbytes, budget.share, budget.auto, budget.everything) == (nbytes, None, False, False)
    assert budget.of(nbytes + 5) == budget.limit(3) == nbytes
    assert budget.of(nbytes // 2) == nbytes // 2
    assert budget.nothing == (nbytes == 0)


@pytest.mark.parametrize(("said", "nbytes"), WHOLE)
def test_whole_floats_above_one_are_bytes(said: float, nbytes: int) -> None:
    assert Budget(said) == Budget(nbytes)
    assert Budget(said).nbytes == nbytes
    assert Budget(1.0).share == 1


TIMES = [
    ("20 ms", "--time 20ms --params N"),
    (" 1.5 s ", "--time 1.5s --params N"),
    ("300µs", "--time 300µs --params N"),
    ("20 ms by  my rates.json ", "--time 20ms --params N --rates 'my rates.json'"),
]


@pytest.mark.parametrize(("said", "options"), TIMES)
def test_a_time_is_refused_with_the_command_that_prints_its_bytes(said: str, options: str) -> None:
    text = f"device_budget is {said!r}, a time; `pagedopt plan {options}` prints the bytes to write instead"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Budget(said)


@pytest.mark.parametrize(
    ("said", "share"),
    [
        (0.0, 0),
        (0.1, Fraction(1, 10)),
        (0.5, Fraction(1, 2)),
        (1.0, 1),
        (1e-6, Fraction(1, 10**6)),
        ("50%", Fraction(1, 2)),
        (" 12.5 % ", Fraction(1, 8)),
        ("0%", 0),
        ("100%", 1),
        ("33.%", Fraction(33, 100)),
    ],
)
def test_shares_are_read(said: float | str, share: Fraction) -> None:
    budget = Budget(said)
    assert (budget.nbytes, budget.share, budget.auto, budget.everything) == (None, share, False, False)
    assert budget.of(1000) == budget.limit(1000) == math.floor(1000 * share)
    assert budget.of(10**30) == math.floor(10**30 * share)
    assert budget.nothing == (share == 0)


def test_all_and_auto() -> None:
    for said in (None, "all"):
        budget = Budget(said)
        assert budget == ALL
        assert (budget.everything, budget.nothing, budget.of(7), budget.limit(7)) == (True, False, 7, None)
    auto = Budget("auto")
    assert (auto.auto, auto.everything, auto.nothing, auto.limit(7)) == (True, False, False, None)
    with pytest.raises(ValueError, match="device_budget is 'auto', which does not follow from a total"):
        auto.of(7)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "all of the state"), ("all", "all of the state"), ("auto", "what the device can spare"),
        (0.25, "25% of the state"), ("12.5%", "12.5% of the state"), ("2GiB", "2.00 GiB"), (0, "0 B"),
    ],
)  # fmt: skip
def test_it_says_what_it_is_and_keeps_what_was_said(said: Given, words: str) -> None:
    budget = Budget(said)
    assert str(budget) == words
    for twin in (copy.deepcopy(budget), pickle.loads(pickle.dumps(budget)), eval(repr(budget))):
        assert (twin, twin.said, hash(twin)) == (budget, said, hash(budget))
    assert Budget.parse(budget) is budget
    assert Budget.parse(said) == budget


def test_what_means_the_same_is_equal() -> None:
    assert Budget("1KiB") == Budget(1024)
    assert Budget("50%") == Budget(0.5)
    assert Budget("0%") != Budget(0)
    assert len({Budget(1.0), Budget("100%"), Budget("all"), Budget(1)}) == 3
    with pytest.raises(AttributeError):
        Budget(5).nbytes = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    "said",
    ["-1", "-1GiB", "", " ", "2 apples", "GiB", "B", "1e9", "0x10", "2 GiB free", "1,5 GB", "1_000", "2KiBB", "nan",
     "inf", "ALL", "Auto"],
)  # fmt: skip
def test_texts_that_are_no_bytes_are_refused(said: str) -> None:
    text = r"device_budget is .*give bytes, or a number with kB, MB, GB.*'50%'"
    with pytest.raises(ValueError, match=text) as caught:
        Budget(said)
    assert repr(said) in str(caught.value)


@pytest.mark.parametrize("said", ["150%", "100.1%", "-5%", "%", "5%%", "5% of it", "nan%", "1e1%"])
def test_texts_that_are_no_shares_are_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"device_budget is .*from '0%' to '100%'") as caught:
        Budget(said)
    assert repr(said) in str(caught.value)


@pytest.mark.parametrize("said", ["0.5", "1.9", ".5", "1.", "."])
def test_a_text_that_may_be_meant_as_a_share_is_asked_back(said: str) -> None:
    with pytest.raises(ValueError, match=r"device_budget is '.*'; bytes are whole: .*'0.5GiB', or a share as '50%'"):
        Budget(said)


@pytest.mark.parametrize("said", [1.5, 2.5e0, 1.0000001, -0.5, -1.0, -0.0001, math.nan, math.inf, -math.inf])
def test_floats_beyond_a_share_are_refused(said: float) -> None:
    with pytest.raises(ValueError, match=r"a float is a share of the state, from 0 to 1; give bytes as an") as caught:
        Budget(said)
    assert f"device_budget is {said!r}" in str(caught.value)


def test_what_is_no_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device_budget is -1; it cannot be negative"):
        Budget(-1)
    text = r"device_budget is .*give bytes as an integer or a text as '2GiB'; a share"
    wrong: tuple[Any, ...] = (True, False, np.True_, [], (1,), b"2GiB", 1j, object)
    for value in wrong:
        with pytest.raises(TypeError, match=text):
            Budget(value)
    with pytest.raises(TypeError, match="nbytes is None"):
        parse_bytes(None, "nbytes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--ring is 'x'"):
        parse_bytes("x", "--ring")


# ---- how a share divides ----

NUMELS = st.lists(st.integers(0, 300_000), min_size=1, max_size=4)
SIZES = st.lists(st.sampled_from((1, 2, 4, 8)), max_size=3)
LAYOUTS = st.lists(st.tuples(NUMELS, SIZES), min_size=1, max_size=4)
SHARES = st.one_of(st.floats(0, 1), st.fractions(0, 1).map(lambda x: f"{float(100 * x):.5f}%"))


def pages_of(layouts: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    return [lay_out(numels, sizes, 4096, 1 << 17).page_bytes() for numels, sizes in layouts]


@given(layouts=LAYOUTS, said=SHARES)
@example(layouts=[([100_000], [4]), ([7], [4])], said=0.5)
@settings(deadline=None, max_examples=60)
def test_a_share_is_kept_in_every_order_and_by_every_arena(layouts: list, said: float | str) -> None:
    budget = Budget(said)
    for order in itertools.permutations(pages_of(layouts)):
        stay = resident_pages(order, budget)
        kept = [int(sizes[:count].sum()) for sizes, count in zip(order, stay, strict=True)]
        total = sum(int(sizes.sum()) for sizes in order)
        assert sum(kept) <= budget.share * total
        for sizes, count in zip(order, stay, strict=True):
            mine = budget.share * int(sizes.sum())
            assert sizes[:count].sum() <= mine, "more than its share"
            assert count == len(sizes) or sizes[: count + 1].sum() > mine, "a page less than its share allows"
        for first in range(len(order)):
            assert resident_pages(order[:first], budget) == stay[:first], (
                "a later arena changed what an earlier one keeps"
            )


# --- the policy: what stays, what passes through.  Replayed on plain values, with no device ---------------------------


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
