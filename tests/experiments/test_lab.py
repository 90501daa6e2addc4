"""A page: bars can be missed, numbers have three digits, tables and pictures show what rows have."""

from __future__ import annotations

import collections
import itertools
import math
import os
import signal
import time
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import toy_child
from experiment_runs import needs_matplotlib
from paths import ROOT

from experiments import child, pictures
from experiments import clock as timing
from experiments.comparing import best, on_one_clock, over
from experiments.lab import Page, Rows, Table, Verdict, number, words
from experiments.pictures import Bars, Lines
from experiments.works import witnesses


def stats(median: float, clock: str = "wall") -> dict[str, Any]:
    return {"clock": clock, "median": median, "p10": median / 2, "p90": 2 * median, "n": 9}


ROWS = Rows([
    {"way": "a", "n": 10, "wall": stats(5.0), "gpu": stats(1.0, "GPU")},
    {"way": "b", "n": 10, "wall": stats(7.0), "gpu": None},
    {"way": "a", "n": 2000, "wall": stats(1234.0), "gpu": stats(2.0, "GPU")},
])  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "limit", "at_least", "said"),
    [
        (1.0, 1.0, False, ("≤ 1 x", "1 x", "met")),
        (1.01, 1.0, False, ("≤ 1 x", "1.01 x", "NOT met")),
        (0.99, 1.0, True, ("≥ 1 x", "0.99 x", "NOT met")),
        (None, 1.0, True, ("≥ 1 x", "-", "not measured here")),
        (18.0, 19, False, ("≤ 19 x", "18 x", "met")),
    ],
)
def test_a_bar_can_be_missed(measured: float | None, limit: float, at_least: bool, said: tuple[str, ...]) -> None:
    assert Verdict("work", measured, limit, "x", at_least).words()[1:] == said


def test_numbers_have_three_digits_and_counts_all() -> None:
    values = (1234.5, 99.94, 12.34, 1.234, None, 16, 5_242_880, 16.0, 1.0)
    assert [number(value) for value in values] == [
        "1,234", "99.9", "12.3", "1.23", "-", "16", "5,242,880", "16.0", "1",
    ]  # fmt: skip
    assert [words({"n": n}, "n") for n in (64, 64.0, {"median": 64.0})] == ["64", "64.0", "64.0"]


def test_the_worst_row_decides_a_bar() -> None:
    page = Page("question")
    page.bar("bar", ROWS, "wall", "≤ 1 µs")
    page.bar("bar", ROWS, "wall", "≥ 1.5 µs")
    page.bar("bar", ROWS.where(way="b"), "gpu", "≥ 1")
    page.bar("bar", ROWS.where(way="c"), len, "≥ 1")
    page.bar("bar", ROWS, lambda rows: (1.0, " (here)"), "≤ 1,048,576 B")
    assert [(bar.title, bar.measured) for bar in page.bars] == [
        ("bar", 1234), ("bar", 5), ("bar", None), ("bar", None), ("bar (here)", 1.0),
    ]  # fmt: skip
    assert [(bar.limit, bar.unit, bar.at_least) for bar in page.bars[1::3]] == [
        (1.5, "µs", True),
        (1_048_576, "B", False),
    ]
    with pytest.raises(ValueError, match="the limit is '< 2'; give one as"):
        page.bar("bar", ROWS, "wall", "< 2")


def test_a_table_has_a_line_per_row_and_a_grid_one_per_way() -> None:
    page = Page("question")
    page.table("{way}, {n}", ROWS, {"way": "way", "µs": "wall", "GPU": "gpu"}, by=("way",))
    page.grid("grid", ROWS, "way", "n", "wall", "n")
    page.grid("grid", Rows(), "way", "n", "wall", "n")
    page.table("none", Rows(), {"way": "way"})
    first, second, grid = page.blocks["question"]
    assert first == Table("a, 10", ["way", "µs", "GPU"], [["a", "5", "1"], ["a", "1,234", "2"]])
    assert isinstance(second, Table)
    assert second.full() == Table("b, 10", ["way", "µs"], [["b", "7"]])
    assert grid == Table("grid", ["n", "10", "2,000"], [["a", "5", "1,234"], ["b", "7", "-"]])


@pytest.mark.parametrize(
    ("code", "report", "words"),
    [
        (-9, [], "ncu was stopped after 200 s"),
        (9, ["==PROF== 0", "==ERROR== LaunchFailed"], "ncu shut down the process that it watched: LaunchFailed"),
        (1, [], "ncu ended with 1: the output's end"),
    ],
)
def test_counters_that_are_not_there_say_why(code: int, report: list[str], words: str) -> None:
    assert witnesses.why_not(code, report, ["the output's end"]) == words


def test_times_of_two_clocks_are_not_compared() -> None:
    assert {row["clock"] for row in on_one_clock(ROWS)} == {"wall"}
    assert {row["clock"] for row in on_one_clock(ROWS.where(way="a"))} == {"GPU"}
    assert over(ROWS[2]["wall"], ROWS[0]["wall"]) == 1234 / 5
    assert best(ROWS[1])["clock"] == "wall"
    with pytest.raises(ValueError, match="says nothing"):
        over(ROWS[0]["wall"], ROWS[0]["gpu"])


@needs_matplotlib
def test_pictures_name_their_axes_and_have_no_legend(tmp_path: Path) -> None:
    page = Page("question")
    rows = Rows(
        {"name": name, "n": time, "time": stats(time)} for name, time in zip("abc", (3.0, 1.0, 7.0), strict=True)
    )
    page.picture("both", rows, [Bars(title="bars", name="name", length="time", unit="ms", line="b"),
                                Lines(title="lines", x="n", y="time", each="name")])  # fmt: skip
    page.picture("none", Rows(), [])
    (path,) = pictures.save_all(page, tmp_path / "x.json")
    assert path == tmp_path / "x-both.png"
    figure = pictures.new_figure(8, 5)
    pictures.onto(figure, rows, page.pictures[0][2])
    bars, lines = figure.axes
    assert [name.get_text() for name in bars.get_yticklabels()] == ["a", "c"], "the shortest on top, b a line"
    assert (bars.get_xlabel(), lines.get_ylabel(), bars.get_legend()) == ("ms, wall", "µs, wall (log)", None)
    assert figure.get_supxlabel() == pictures.WHISKERS


# --- the only clock: interleaved rounds, a gate that may fail, and summaries ------------------------------------------


CPU = torch.device("cpu")


def test_a_series_has_its_clock_and_its_percentiles() -> None:
    ends = {"min": 0, "p5": 5, "p10": 10, "p25": 25, "median": 50, "p75": 75, "p90": 90, "p95": 95, "max": 100}
    assert timing.series(range(101), "host") == {"clock": "host", **ends, "n": 101}


def test_rounds_are_interleaved_and_rotate() -> None:
    log: list[str] = []
    cases = [timing.Case(name, lambda n=name: log.append(n), lambda: log.append("|")) for name in "abc"]  # type: ignore[misc]
    timings = timing.measure(cases, CPU, rounds=3, warmup=1)
    assert "".join(log) == "|a|b|c" + "|a|b|c" + "|b|c|a" + "|c|a|b"
    assert all(t["wall"]["n"] == 3 and t["gpu"] is None for t in timings.values())


def test_no_case_always_comes_behind_the_same_one() -> None:
    log: list[str] = []
    cases = [timing.Case(name, lambda n=name: log.append(n)) for name in "abcd"]  # type: ignore[misc]
    timing.measure(cases, CPU, rounds=100, warmup=0)
    behind = collections.Counter(itertools.pairwise(log))
    assert all(collections.Counter(log[i : i + 4]) == collections.Counter("abcd") for i in range(0, 400, 4))
    assert all(behind[one, other] > 15 for one in "abcd" for other in "abcd" if one != other)


def test_rounds_stop_with_the_time() -> None:
    calls: list[int] = []
    timing.measure([timing.Case("a", lambda: calls.append(1))], CPU, rounds=1000, seconds=0, warmup=0)
    assert len(calls) == timing.MIN_ROUNDS


class FakeGpu:
    """A stream whose spinning kernel ends after so many µs, however long the host takes to queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_us: float) -> None:
        self.spins: list[int] = []
        self.host_us = host_us
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None: ...
            def record(self) -> None: ...
            def query(self) -> bool:
                return gpu.spins[-1] < gpu.host_us

            def elapsed_time(self, other: Any) -> float:
                return 0.008

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "_sleep", self.spins.append, raising=False)
        monkeypatch.setattr(timing, "cycles_per_us", lambda device: 1)


def test_a_gate_that_opened_early_is_tried_again_with_a_longer_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, host_us=900)
    clock = timing.CudaClock(timing.Case("a", lambda: None, repeats=4))
    assert clock.sample()[2] == pytest.approx(2)  # 8 µs over 4 runs
    assert [round(s / gpu.spins[0]) for s in gpu.spins] == [1, 2, 4, 8, 16][: len(gpu.spins)]
    assert gpu.spins[-1] >= 900 > gpu.spins[-2]


def test_the_host_s_time_ends_with_the_call_and_the_wall_s_with_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, host_us=0)
    times = iter((5.0, 5.002, 5.003))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    host, wall, _ = timing.CudaClock(timing.Case("a", lambda: None)).sample()
    assert (host, wall) == (pytest.approx(2000), pytest.approx(3000))


def test_a_gate_that_never_holds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, host_us=math.inf)
    clock = timing.CudaClock(timing.Case("a", lambda: None))
    assert clock.sample()[2] is None
    tried = len(gpu.spins)
    assert clock.sample()[2] is None
    assert len(gpu.spins) == tried
    assert timing.measure([clock.case], torch.device("cuda"), rounds=3)["a"]["gpu"] is None


def test_a_first_call_that_compiles_is_not_the_end_of_gpu_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a compiled contender would have wall times beside another's GPU times."""
    FakeGpu(monkeypatch, host_us=0)
    monkeypatch.setattr(timing, "LONGEST_SPIN", 5_000)
    slow = [0.02]
    clock = timing.CudaClock(timing.Case("compiled", lambda: sleep(slow.pop()) if slow else None))
    assert [sample[2] is None for sample in (clock.sample(), clock.sample(), clock.sample())] == [True, False, False]


# --- A function in a process of its own: what it yields comes back, however it ends -----------------------------------


HELPERS = {"PYTHONPATH": str(Path(toy_child.__file__).parent)}


def start(function: Any, *arguments: Any, limit: float = 60, **more: Any) -> child.Child:
    return child.Child(function, *arguments, limit=limit, **{"environment": HELPERS, **more})


def test_rows_come_back_from_another_process() -> None:
    process = start(toy_child.count, 3)
    rows = list(process)
    assert [row["n"] for row in rows] == [0, 1, 2]
    assert {row["pid"] for row in rows} == {process.pid} != {os.getpid()}
    assert process.ended is None


@pytest.mark.parametrize(
    ("function", "words"), [(toy_child.crash, f"ended with {-signal.SIGABRT}: "), (toy_child.fail, "ended with 1: ")]
)
def test_rows_of_a_child_that_dies_are_kept(function: Any, words: str) -> None:
    process = start(function)
    assert list(process) == [{"n": 0}]
    assert process.ended is not None
    assert process.ended.startswith(words)
    assert ("ValueError: of no use" in process.ended) is (function is toy_child.fail)
    with pytest.raises(RuntimeError, match=f"the process of {function.__name__} {words}"):
        child.only(function, limit=60, environment=HELPERS)


def test_a_child_that_never_ends_is_stopped() -> None:
    process = start(toy_child.hang, limit=2)
    begin = time.monotonic()
    assert list(process) == [{"n": 0}]
    assert time.monotonic() - begin < 30
    assert process.ended == "was stopped after 2 s"


def test_who_is_no_longer_listened_to_is_ended() -> None:
    process = start(toy_child.hang)
    rows = iter(process)
    assert next(rows) == {"n": 0}
    rows.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_child_has_the_variables_it_is_given() -> None:
    assert list(start(toy_child.seen, environment={**HELPERS, "TOY": "x"})) == [{"tree": str(ROOT), "variable": "x"}]


def test_only_what_a_child_can_import_is_called() -> None:
    with pytest.raises(ValueError, match="a child calls a function of a module"):
        child.Child(lambda: iter(()), limit=1)
    with pytest.raises(RuntimeError, match="gave 2 rows, not one"):
        child.only(toy_child.count, 2, limit=60, environment=HELPERS)
