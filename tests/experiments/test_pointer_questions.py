"""Ways of a list of pointers: a real run of toys, what is made of its rows, and what the compiler says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from experiment_runs import judged, regenerated, run_quick
from played_tables import decode

from experiments.harness.rows import Rows
from experiments.harness.time import series
from experiments.pointers import advice, attempts, transports
from experiments.works import handed_over, ways
from experiments.works.tiny_lists import COPIES, Lists, TorchCopies
from pagedopt.transports.ring import ManagedTransport

CPU = torch.device("cpu")
PAGEABLE, PINNED = COPIES


def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("pointer_transports", tmp_path, plots=["transports", "norms"])
    assert "advice, graphs: need a GPU" in found["left_out"]
    tried = found["parts"]["attempts"]["rows"]
    assert [row["name"] for row in tried] == list(attempts.QUICK)
    assert all(row["as_expected"] for row in tried)
    assert {row["way"] for row in found["parts"]["transports"]["rows"]} == {"Numba"}


def test_what_is_committed_comes_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("pointer_transports", "nvidia-h200") == 4
    regenerated("pointer_transports", tmp_path, monkeypatch)


# --- what is made of rows


def walls(**by_way: list[float]) -> Rows:
    names = {"memcpy": "memcpy", "managed": "managed", "structs": "struct 4 KB", "torch": PAGEABLE}
    return Rows(
        {"lists": lists, "count": count, "mode": mode, "way": names[way], "wall": series([wall], "wall")}
        for lists in (1, 4)
        for mode in ("rewritten", "unchanged")
        for way, times in by_way.items()
        for count, wall in zip((10, 100, 1000), times, strict=True)
    )


def test_the_transport_bar_is_managed_over_the_best() -> None:
    near, far = (walls(managed=[us, us, 20], memcpy=[20, 20, 20], structs=[90, 90, 90]) for us in (23, 24))
    assert transports.managed_over_best(near.where(lists=4)) == {10: 1.15, 100: 1.15, 1000: 1}
    assert all(bar.verdict(near).met for bar in transports.BARS)
    missed = [bar.verdict(far) for bar in transports.BARS]
    assert [verdict.met for verdict in missed] == [False, False]
    assert missed[1].work == "managed ÷ best transport, list rewritten, 4 lists (worst at 10 tensors)"
    assert [bar.verdict(near.where(way="memcpy")).met for bar in transports.BARS] == [None, None]


def test_the_copy_breaks_even_where_it_stays_faster() -> None:
    rows = walls(structs=[20, 40, 300], memcpy=[30, 45, 50], torch=[100, 400, 3000])
    assert transports.break_even(rows, "memcpy") == (100, 1000)
    assert transports.break_even(rows, PAGEABLE) == (1000, None)
    said = transports.sentences(rows)
    assert "memcpy, a copy and one launch, beats structs of 4 KB from 1,000 tensors on, not yet at 100." in said
    assert f"{PAGEABLE}, a copy and one launch, takes longer than structs of 4 KB at every size" in said
    assert transports.break_even(walls(structs=[90, 40, 300], memcpy=[30, 30, 50]), "memcpy") == (None, 10)


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


@pytest.mark.parametrize("name", COPIES)
def test_torchs_copies_hold_the_table_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Lists(4, 9, CPU)
    table = work.sweep.table.host
    way = COPIES[name](0)
    monkeypatch.setattr(TorchCopies, "copied", lambda self, words: words)
    seen = []
    for _ in range(2):
        with way.lend(table, 0) as lent:
            ((argument, count),) = lent.parts()
            seen.append(decode(argument, table))
            assert count == len(table.chunks)
            ((part, few),) = lent.parts((2, 5))
            assert (few, decode(part, table)[1]) == (3, seen[-1][1][2:5])
        work.rewrite()
    assert seen[0] != seen[1], "rewritten in between"
    assert way.copied_bytes == 2 * table.words.nbytes


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
    (bar,) = advice.BARS
    assert bar.verdict(Rows({"beside": names} for names in beside.values())).met is False
    assert bar.verdict(Rows([{"beside": []}])).met is True


# --- the lecture's attempts


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vector_nvrtc", 'could not open source file "vector"'),
        ("vector_nvcc", "calling a __host__ function"),
        ("struct_too_large", "32768 bytes required, max 32764"),
        ("limit_before_12_1", "544 pointers"),
        ("limit_today", "4,095 pointers (32,760 bytes) alone, 4,094 beside"),
        ("limit_three_lists", "1,365 tensors in three lists (32,760 bytes); the documented 4,096 bytes hold 170"),
        ("source_norm_424", "424 norms, all right"),
    ],
)
def test_what_attempts_say(name: str, words: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    (row,) = attempts.outcome(name)
    if row["outcome"] == "left out":
        pytest.skip(row["message"])
    assert attempts.judged(name, [row], None)["as_expected"]
    assert words in row["message"]


def test_the_struct_that_is_cut_compiles() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        assert handed_over.by_nvrtc(handed_over.ARRIVED, f"arrived<{attempts.CUT_POINTERS}>") == "compiled"
    except handed_over.LeftOut as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("limit", [1, 2, 511, 4095])
def test_largest_finds_the_limit(limit: int) -> None:
    assert handed_over.largest(lambda n: n <= limit) == limit


def test_an_attempt_that_crashes_has_failed_and_surprises() -> None:
    crashed = attempts.judged("foreach_norm_424", [], "ended with -11: Segmentation fault")
    assert (crashed["outcome"], crashed["as_expected"]) == ("fails", False)
    assert "-11" in crashed["message"]
    assert attempts.judged("host_list", [], "was stopped after 120 s")["as_expected"] is False
    meant, wrong = (attempts.judged("host_list", [{"outcome": o, "message": ""}], None) for o in ("fails", "works"))
    (bar,) = attempts.BARS
    assert bar.verdict(Rows([meant])).met is True
    verdict = bar.verdict(Rows([meant, wrong, crashed]))
    assert (verdict.measured, verdict.met) == (2, False)
    assert "torch._foreach_norm of 424 tensors" in verdict.work


def test_an_attempt_of_which_nobody_said_how_it_ends() -> None:
    for outcome in ("works", "fails", "left out"):
        assert attempts.judged("cut_by_hand", [{"outcome": outcome, "message": ""}], None)["as_expected"]
    assert not attempts.judged("cut_by_hand", [], "ended with -11: ")["as_expected"]
