"""The lecture's words to the letter: torch's own copies, arguments cut by hand; and tables that share a page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import decode

from experiments.harness.rows import Rows
from experiments.pointers import advice, attempts, transports
from experiments.works import ways
from experiments.works.tiny_lists import COPIES, Lists, TorchPageable, TorchPinned
from pagedopt.transports.ring import ManagedTransport


@pytest.mark.parametrize("make", [TorchPageable, TorchPinned])
def test_torchs_copies_hold_the_table_as_it_is(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Lists(4, 9, torch.device("cpu"))
    table = work.sweep.table.host
    way = make(0)
    monkeypatch.setattr(make, "copied", lambda self, words: words)
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
    assert set(COPIES) == {TorchPageable.name, TorchPinned.name}


def walls(**by_way: list[float]) -> Rows:
    names = {"memcpy": "memcpy", "structs": "struct 4 KB", "torch": TorchPageable.name}
    return Rows(
        {"lists": 4, "count": count, "mode": "rewritten", "way": names[way], "wall": {"median": wall}}
        for way, times in by_way.items()
        for count, wall in zip((10, 100, 1000), times, strict=True)
    )


def test_the_copy_breaks_even_where_it_stays_faster() -> None:
    rows = walls(structs=[20, 40, 300], memcpy=[30, 45, 50], torch=[100, 400, 3000])
    assert transports.break_even(rows, "memcpy") == (100, 1000)
    assert transports.break_even(rows, TorchPageable.name) == (1000, None)
    said = transports.sentences(rows)
    assert "memcpy, a copy and one launch, beats structs of 4 KB from 1,000 tensors on, not yet at 100." in said
    assert f"{TorchPageable.name}, a copy and one launch, takes longer than structs of 4 KB at every size" in said
    sooner = walls(structs=[90, 40, 300], memcpy=[30, 30, 50], torch=[1, 1, 1])
    assert transports.break_even(sooner, "memcpy") == (None, 10)
    assert "beats structs" not in transports.sentences(walls(structs=[1, 1, 1], memcpy=[1, 1, 1])), "older rows"


def managed(*addresses: int, words: int = 31) -> ManagedTransport:
    way = ManagedTransport.__new__(ManagedTransport)
    way._buffers = [SimpleNamespace(source=a, words=np.zeros(words)) for a in addresses]  # type: ignore[misc]
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
    assert bar.verdict(Rows([{"way": "a"}])).met is None, "nobody looked"


def test_three_lists_and_the_struct_that_is_cut_compile() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        assert attempts.limit_three_lists().startswith("1,365 tensors in three lists (32,760 bytes)")
        assert attempts.limit_three_lists().endswith("4,096 bytes hold 170")
        assert attempts._compile(attempts.ARRIVED, f"arrived<{attempts.CUT_POINTERS}>") == "compiled"
    except attempts.LeftOut as error:
        pytest.skip(str(error))


def test_an_attempt_of_which_nobody_said_how_it_ends() -> None:
    for outcome in ("works", "fails", "left out"):
        assert attempts.judged("cut_by_hand", [{"outcome": outcome, "message": ""}], None)["as_expected"]
    assert not attempts.judged("cut_by_hand", [], "ended with -11: ")["as_expected"]
    assert attempts.source_norm(424).startswith("424 norms, all right")
