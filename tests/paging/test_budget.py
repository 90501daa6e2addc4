"""What users say of how much stays: read once, refused in words, and divided between arenas."""

from __future__ import annotations

import copy
import math
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
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
    (2**70, 2**70),
    ("123", 123),
    ("500 MB", 500 * 1000**2),
    ("2gib", 2 * GIB),
    ("2Gi", 2 * GIB),
    (" 1.5 GB ", 1_500_000_000),
    ("1.TB", 1000**4),
    ("4kB", 4000),
    ("1.9b", 1),  # bytes are whole
    ("9007199254740993", 2**53 + 1),  # a float would lose the last one
    ("1" + "0" * 400, 10**400),  # and could not hold this
    (np.int64(2 * GIB), 2 * GIB),
    (np.uint64(2**63 + 1), 2**63 + 1),
    (2.0, 2),  # whole floats above 1 are bytes
    (2.0**70, 2**70),
]


@pytest.mark.parametrize(("said", "nbytes"), BYTES)
def test_bytes_are_read(said: int | float | str, nbytes: int) -> None:
    budget = Budget(said)
    assert type(budget.said) in (int, float, str)  # it is pickled
    assert type(budget.nbytes) is int
    assert (budget.nbytes, budget.share, budget.auto, budget.everything) == (nbytes, None, False, False)
    assert budget.of(nbytes + 5) == budget.limit(3) == nbytes
    assert budget.of(nbytes // 2) == nbytes // 2
    assert budget.nothing == (nbytes == 0)


@pytest.mark.parametrize(
    ("said", "share"),
    [
        (0.0, 0),
        (0.1, Fraction(1, 10)),
        (1.0, 1),
        (" 12.5 % ", Fraction(1, 8)),
        ("0%", 0),
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


BYTES_IN_WORDS, SHARE = "give bytes, or a number with kB, MB, GB.*'50%'", "a float is a share of the state, from 0 to 1"
TIME = "a time; `pagedopt plan --time {} --params N{}` prints the bytes to write instead$"
#: What is refused, by what the error says of it.
REFUSED: list[tuple[str, tuple[Any, ...]]] = [
    (BYTES_IN_WORDS, ("-1", "-1GiB", "", " ", "2 apples", "GiB", "B", "1e9", "0x10", "2 GiB free", "1,5 GB", "1_000")),
    (BYTES_IN_WORDS, ("2KiBB", "nan", "inf", "ALL", "Auto")),
    ("from '0%' to '100%'", ("150%", "100.1%", "-5%", "%", "5%%", "5% of it", "nan%", "1e1%")),
    ("bytes are whole: give a unit as in '0.5GiB', or a share as '50%'", ("0.5", "1.9", ".5", "1.", ".")),
    (SHARE, (1.5, 2.5e0, 1.0000001, -0.5, -1.0, -0.0001, math.nan, math.inf, -math.inf)),
    ("it cannot be negative", (-1,)),
    (TIME.format("20ms", ""), ("20 ms",)),
    (TIME.format("1.5s", ""), (" 1.5 s ",)),
    (TIME.format("300µs", ""), ("300µs",)),
    (TIME.format("20ms", " --rates 'my rates.json'"), ("20 ms by  my rates.json ",)),
    ("give bytes as an integer or a text as '2GiB'; a share", (True, False, np.True_, [], (1,), b"2GiB", 1j, object)),
]


@pytest.mark.parametrize(("said", "text"), [(said, text) for text, every in REFUSED for said in every], ids=repr)
def test_what_is_no_budget_is_refused(said: Any, text: str) -> None:
    kind = ValueError if type(said) in (int, float, str) else TypeError
    with pytest.raises(kind, match=rf"^device_budget is {re.escape(repr(said))}.*{text}"):
        Budget(said)


def test_an_error_names_the_option() -> None:
    with pytest.raises(TypeError, match="nbytes is None"):
        parse_bytes(None, "nbytes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--ring is 'x'"):
        parse_bytes("x", "--ring")


# --- the policy: what stays, what passes through.  Replayed on plain values, with no device ---------------------------

#: Bytes of the pages of several arenas; an arena may have none, a page none either (a rule without state).
ARENAS = st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=5)


def kept(arenas: list[list[int]], budget: Budget) -> list[int]:
    return resident_pages([np.array(sizes, np.int64) for sizes in arenas], budget)


@given(ARENAS, st.one_of(st.floats(0, 1), st.fractions(0, 1).map(lambda x: f"{float(100 * x):.5f}%")))
@example([[40, 1], [2]], 0.5)
def test_every_arena_keeps_its_share_whatever_the_others_are(arenas: list[list[int]], said: float | str) -> None:
    budget = Budget(said)
    for sizes, stay in zip(arenas, kept(arenas, budget), strict=True):
        mine = budget.share * sum(sizes)
        assert sum(sizes[:stay]) <= mine, "more than its share"
        assert stay == len(sizes) or sum(sizes[: stay + 1]) > mine, "a page less than its share allows"


@given(ARENAS, st.integers(0, 600), st.integers(0, 600))
@example([[10, 10], [1]], 15, 20)
@example([[], [3]], 3, 3)
@example([[10], [6, 6]], 9, 10)
def test_bytes_go_to_the_first_pages_of_all_arenas(arenas: list[list[int]], one: int, other: int) -> None:
    few, more = sorted((one, other))
    boundaries = kept(arenas, Budget(few))
    used = [sum(sizes[:stay]) for sizes, stay in zip(arenas, boundaries, strict=True)]
    assert sum(used) <= few
    left_out = [i for i, stay in enumerate(boundaries) if stay < len(arenas[i])]
    if left_out:
        first = left_out[0]
        assert sum(used) + arenas[first][boundaries[first]] > few, "the next page would still fit"
        assert not any(used[first + 1 :]), "behind the first page that goes away none with bytes stays"
    larger = kept(arenas, Budget(more))
    assert all(a <= b for a, b in zip(boundaries, larger, strict=True)), "a change of budget moves pages one way only"
    for i in range(len(arenas)):
        assert kept(arenas[:i], Budget(few)) == boundaries[:i], "a later arena changed what an earlier one keeps"


@given(ARENAS)
def test_no_budget_is_no_limit(arenas: list[list[int]]) -> None:
    for budget in (ALL, Budget(sum(map(sum, arenas))), Budget(2**70)):
        assert kept(arenas, budget) == [len(sizes) for sizes in arenas]


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
