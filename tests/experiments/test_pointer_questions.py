"""Ways of a list of pointers: what is compared, what is checked first, and what the compiler says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.harness.rows import Rows
from experiments.harness.time import series
from experiments.pointers import attempts, transports
from experiments.works import handed_over, ways
from experiments.works.tiny_lists import Lists
from pagedopt.transports.ring import ManagedTransport

CPU = torch.device("cpu")


# --- what is compared


def walls(**by_way: list[float]) -> Rows:
    """Of lists of 10, 100 and 1,000 tensors."""
    return Rows(
        {"lists": 4, "count": count, "mode": "rewritten", "way": way, "wall": series([wall], "wall")}
        for way, times in by_way.items()
        for count, wall in zip((10, 100, 1000), times, strict=True)
    )


def test_the_managed_list_is_held_to_the_best_way() -> None:
    rows = walls(managed=[23, 23, 20], memcpy=[20, 20, 20])
    assert transports.managed_over_best(rows) == {10: 1.15, 100: 1.15, 1000: 1}


def test_a_copy_breaks_even_where_it_stays_faster() -> None:
    rows = walls(**{"struct 4 KB": [20, 40, 300]}, memcpy=[30, 45, 50], slow=[100, 400, 3000], fast=[9, 9, 9])
    found = [transports.break_even(rows, way) for way in ("memcpy", "slow", "fast")]
    assert found == [(100, 1000), (1000, None), (None, 10)]


# --- what is measured is checked first


def test_lists_notice_a_missed_update() -> None:
    work = Lists(4, 7, CPU)
    for _ in range(3):
        work.step()
        work.rewrite()
        work.other_scalar()
    work.check("fine")
    assert work.total == [2.0, 2.0]
    work.sweep.run([work.sweep.rule.uniforms({"by": 1.0})])  # not counted
    with pytest.raises(AssertionError, match="list 0 of set 1 is not what"):
        work.check("one too many")


def test_lists_notice_a_write_beyond_a_tensor() -> None:
    work = Lists(1, 3, CPU)
    work.memory[0][0][1, 6] += 1
    with pytest.raises(AssertionError, match="written beyond"):
        work.check("torn")


def managed(*addresses: int) -> ManagedTransport:
    way = ManagedTransport.__new__(ManagedTransport)
    way._buffers = [SimpleNamespace(source=a, words=np.zeros(31)) for a in addresses]  # type: ignore[misc]
    way._reserve = []
    return way


def test_tables_that_share_a_page_are_noticed() -> None:
    page = ways.PAGESIZE
    found = {"a": managed(page, page + 256), "b": managed(2 * page - 100), "c": managed(3 * page), "memcpy": None}
    beside = ways.neighbours(found)
    assert beside == {"a": ["b"], "b": ["a"], "c": []}


# --- the lecture's attempts


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vector_nvrtc", 'could not open source file "vector"'),
        ("limit_before_12_1", "544 pointers"),
        ("limit_today", "4,095 pointers (32,760 bytes) alone, 4,094 beside"),
        ("limit_three_lists", "1,365 tensors in three lists (32,760 bytes); the documented 4,096 bytes hold 170"),
    ],
)
def test_what_attempts_say(name: str, words: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    (row,) = attempts.outcome(name)
    if row["outcome"] == "left out":
        pytest.skip(row["message"])
    assert attempts.judged(name, [row], None)["as_expected"]
    assert words in row["message"]


@pytest.mark.parametrize("limit", [1, 2, 4095])
def test_largest_finds_the_limit(limit: int) -> None:
    assert handed_over.largest(lambda n: n <= limit) == limit


def test_an_attempt_that_crashes_has_failed_and_surprises() -> None:
    crashed = attempts.judged("foreach_norm_424", [], "ended with -11: Segmentation fault")
    assert (crashed["outcome"], crashed["as_expected"]) == ("fails", False)
    assert "-11" in crashed["message"]
    assert attempts.judged("host_list", [], "was stopped after 120 s")["as_expected"] is False
    for outcome, meant in (("fails", True), ("works", False)):
        assert attempts.judged("host_list", [{"outcome": outcome, "message": ""}], None)["as_expected"] is meant


def test_an_attempt_of_which_nobody_said_how_it_ends() -> None:
    for outcome in ("works", "fails", "left out"):
        assert attempts.judged("cut_by_hand", [{"outcome": outcome, "message": ""}], None)["as_expected"]
    assert not attempts.judged("cut_by_hand", [], "ended with -11: ")["as_expected"]
