"""The only clock: interleaved rounds, a gate that may fail, and summaries."""

from __future__ import annotations

import collections
import itertools
import math
from time import sleep
from typing import Any

import pytest
import torch

from experiments import clock as timing

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
