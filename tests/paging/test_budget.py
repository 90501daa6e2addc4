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
from pagedopt.paging.pages import lay_out
from pagedopt.paging.policy import resident_pages

GIB = 1 << 30

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


@given(layouts=LAYOUTS, one=SHARES, other=SHARES)
@settings(deadline=None, max_examples=60)
def test_a_larger_share_keeps_what_a_smaller_one_keeps(layouts: list, one: float | str, other: float | str) -> None:
    pages, budgets = pages_of(layouts), sorted((Budget(one), Budget(other)), key=lambda b: b.share)
    assert all(a <= b for a, b in zip(*(resident_pages(pages, budget) for budget in budgets), strict=True))
    assert resident_pages(pages, Budget(1.0)) == [len(sizes) for sizes in pages]
