"""Ways of a list of pointers: a real run of toys, what is made of its rows, and what the compiler says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiment_runs import judged, regenerated, run_quick

from experiments.harness.rows import Rows
from experiments.pointers import attempts, transports
from experiments.works.tiny_lists import Lists

CPU = torch.device("cpu")


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


def stats(median: float) -> dict[str, float]:
    return {"median": median, "p10": median, "p90": median, "n": 9}


def made_up(managed: float) -> Rows:
    walls = {"managed": managed, "memcpy": 20.0, "struct 4 KB": 90.0}
    return Rows(
        {"lists": lists, "count": count, "mode": mode, "way": way, "wall": stats(wall)}
        for lists in (1, 4)
        for count in (10, 1000)
        for mode in ("rewritten", "unchanged")
        for way, wall in walls.items()
    )


def test_the_transport_bar_is_managed_over_the_best() -> None:
    assert transports.managed_over_best(made_up(23.0).where(lists=4)) == {10: 1.15, 1000: 1.15}
    assert all(bar.verdict(made_up(19.0)).met for bar in transports.BARS)
    missed = [bar.verdict(made_up(24.0)) for bar in transports.BARS]
    assert [verdict.met for verdict in missed] == [False, False]
    assert missed[1].work == "managed ÷ best transport, list rewritten, 4 lists (worst at 10 tensors)"
    assert [bar.verdict(made_up(19.0).where(way="memcpy")).met for bar in transports.BARS] == [None, None]


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


# --- the lecture's attempts


def compiler_says(name: str) -> str:
    pytest.importorskip("cuda.bindings.nvrtc")
    from pagedopt.kernels.nvrtc import CompileError

    try:
        return attempts.ATTEMPTS[name].run()
    except attempts.LeftOut as error:
        pytest.skip(str(error))
    except (CompileError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vector_nvrtc", 'could not open source file "vector"'),
        ("vector_nvcc", "calling a __host__ function"),
        ("struct_too_large", "32768 bytes required, max 32764"),
        ("limit_before_12_1", "544 pointers"),
        ("limit_today", "4,095 pointers (32,760 bytes) alone, 4,094 beside"),
    ],
)
def test_what_the_compiler_says(name: str, words: str) -> None:
    assert words in compiler_says(name)


@pytest.mark.parametrize("limit", [1, 2, 511, 4095])
def test_largest_finds_the_limit(limit: int) -> None:
    assert attempts.largest(lambda n: n <= limit, 1, 1 << 16) == limit


def test_a_child_that_crashes_is_a_failed_attempt() -> None:
    crashed = attempts.judged("foreach_norm_424", [], "ended with -11: Segmentation fault")
    assert (crashed["outcome"], crashed["as_expected"]) == ("fails", False)
    assert "-11" in crashed["message"]
    assert attempts.judged("host_list", [], "was stopped after 120 s")["as_expected"] is False
    meant = attempts.judged("host_list", [{"outcome": "fails", "message": "illegal access"}], None)
    assert meant["as_expected"] is True
    wrong = attempts.judged("host_list", [{"outcome": "works", "message": "reads"}], None)
    (bar,) = attempts.BARS
    assert bar.verdict(Rows([meant])).met is True
    verdict = bar.verdict(Rows([meant, wrong, crashed]))
    assert (verdict.measured, verdict.met) == (2, False)
    assert "torch._foreach_norm of 424 tensors" in verdict.work
