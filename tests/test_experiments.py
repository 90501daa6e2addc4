"""The experiments run anywhere, their statistics are right, and their verdicts can fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import attempts, bench, fused_step, fused_tables, pointer_transports, report, transport_tables
from experiments.__main__ import found
from experiments.tiny_lists import Lists
from experiments.workloads import Contender, Reference, Work, gpt2_shapes, ours, theirs

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


# --- whole scripts


def run_script(name: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments", name, "--quick", "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # to name the card takes some of its memory
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "bars" in done.stdout
    path = out / f"{name}-cpu.json"
    found = dict(json.loads(path.read_text()))
    assert {"commit", "dirty"} <= found["machine"].keys()
    assert ("a note is not filled from that" in done.stdout) is (found["machine"]["dirty"] is not False)
    found["machine"].update(commit="abc1234", dirty=False)  # whatever the state of the tree under test
    path.write_text(json.dumps(found))
    return found


@pytest.mark.parametrize(
    ("module", "plots", "sections"),
    [
        (pointer_transports, ["transports", "norms"], transport_tables.sections),
        (fused_step, ["steps"], fused_tables.sections),
    ],
)
def test_script_runs_on_a_cpu(
    module: Any,
    plots: list[str],
    sections: Callable[..., dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = module.__name__.rpartition(".")[2]
    result = run_script(name, tmp_path)
    assert result["machine"]["torch"] == torch.__version__
    assert result["machine"]["cores"] > 0
    assert any("need a GPU" in line for line in result["left_out"])
    assert all(set(bar) >= {"work", "measured", "limit", "met"} for bar in result["verdicts"])
    if report.new_figure(1, 1) is not None:
        assert sorted(p.name for p in tmp_path.glob("*.png")) == sorted(f"{name}-cpu-{p}.png" for p in plots)

    note = tmp_path / f"{name}.md"
    note.write_text((ROOT / "notes" / f"{name}.md").read_text())
    monkeypatch.setattr(report, "NOTES", tmp_path)
    assert module.main(["--note", str(tmp_path / f"{name}-cpu.json")]) == 0
    filled = note.read_text()
    for content in sections(result).values():
        assert content in filled
    assert "not measured here" in filled
    assert module.main(["--note", "--out", str(tmp_path)]) == 0
    assert note.read_text() == filled


def test_every_experiment_is_listed() -> None:
    names = found()
    assert {"pointer_transports", "fused_step", "attempts"} <= set(names)
    assert all(line.endswith(("?", ".")) or "?" in line for line in names.values())


def test_unknown_experiment_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    from experiments.__main__ import main

    assert main(["no_such"]) == 2
    assert "fused_step" in capsys.readouterr().err


# --- timing


def test_stats() -> None:
    stats = bench.Stats.of(range(101))
    assert stats == bench.Stats(median=50, p10=10, p90=90, n=101)


def test_rounds_are_interleaved_and_rotate() -> None:
    log: list[str] = []
    cases = [bench.Case(name, lambda n=name: log.append(n), lambda: log.append("|")) for name in "abc"]  # type: ignore[misc]
    timings = bench.measure(cases, CPU, rounds=3, warmup=1)
    assert "".join(log) == "|a|b|c" + "|a|b|c" + "|b|c|a" + "|c|a|b"
    assert all(t.wall.n == 3 and t.gpu is None for t in timings.values())


def test_rounds_stop_with_the_time() -> None:
    calls: list[int] = []
    bench.measure([bench.Case("a", lambda: calls.append(1))], CPU, rounds=1000, seconds=0, warmup=0)
    assert len(calls) == bench.MIN_ROUNDS


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
        monkeypatch.setattr(bench, "cycles_per_us", lambda device: 1)


def test_a_gate_that_opened_early_is_tried_again_with_a_longer_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, host_us=900)
    clock = bench._CudaClock(bench.Case("a", lambda: None, repeats=4))
    assert clock.sample()[2] == pytest.approx(2)  # 8 µs over 4 runs
    assert [round(s / gpu.spins[0]) for s in gpu.spins] == [1, 2, 4, 8, 16][: len(gpu.spins)]
    assert gpu.spins[-1] >= 900 > gpu.spins[-2]


def test_a_gate_that_never_holds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, host_us=math.inf)
    clock = bench._CudaClock(bench.Case("a", lambda: None))
    assert clock.sample()[2] is None
    tried = len(gpu.spins)
    assert clock.sample()[2] is None
    assert len(gpu.spins) == tried
    assert bench._timing([clock.sample()] * 3).gpu is None


# --- verdicts and notes


@pytest.mark.parametrize(
    ("measured", "at_least", "met"), [(1.0, False, True), (1.01, False, False), (0.99, True, False), (None, True, None)]
)
def test_a_bar_can_be_missed(measured: float | None, at_least: bool, met: bool | None) -> None:
    bar = report.Bar("work", measured, 1.0, "x", at_least)
    assert bar.met is met
    assert bar.words()[3] == {True: "met", False: "NOT met", None: "not measured here"}[met]


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (99.94, "99.9"), (12.34, "12.3"), (1.234, "1.23"), (None, "-")]
)
def test_number(value: float | None, text: str) -> None:
    assert report.number(value) == text


def test_a_note_without_a_place_is_refused(tmp_path: Path) -> None:
    note = tmp_path / "note.md"
    note.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for 'bars'"):
        report.fill(note, {"bars": "|"})


def stats(median: float) -> dict[str, float]:
    return {"median": median, "p10": median, "p90": median, "n": 9}


def timing(wall: float, gpu: float | None = None) -> dict[str, Any]:
    return {"host": stats(wall), "wall": stats(wall), "gpu": stats(gpu) if gpu else None}


def transport_rows(managed: float) -> list[dict[str, Any]]:
    walls = {"managed": managed, "memcpy": 20.0, "struct 4 KB": 90.0}
    return [
        {"lists": lists, "count": count, "mode": mode, "way": way, "launches": 1, "copied_bytes": 0, **timing(wall)}
        for lists in (1, 4)
        for count in (10, 1000)
        for mode in ("rewritten", "unchanged")
        for way, wall in walls.items()
    ]


def test_the_transport_bar_is_managed_over_the_best() -> None:
    assert transport_tables.managed_over_best(transport_rows(23.0), 4) == {10: 1.15, 1000: 1.15}
    assert all(bar.met for bar in pointer_transports.bars(transport_rows(19.0)))
    assert not any(bar.met for bar in pointer_transports.bars(transport_rows(24.0)))


def fused_result(slower: float = 1.0) -> dict[str, Any]:
    """Results of a GPU on which every bar is met, unless PagedAdamW takes ``slower`` times as long."""
    mine = 100 * slower
    times = {
        "PagedAdamW": timing(mine, mine),
        "torch fused": timing(1000, 1000),
        "copy of its bytes": timing(99, 99),
    }
    works = [(key, "cuda") for key in ("gpt2", "1b", "gpt2-bf16", "1000", "5000")] + [("5000", "cpu"), ("50m", "cpu")]
    steps = [
        {"key": key, "device": device, "work": key, "numel": 1, "bytes": 28, "errors": {}, "times": times}
        for key, device in works
    ]
    fresh = {"best": 0.1 * slower, **stats(0.1 * slower)}
    return {
        "device": "cuda", "steps": steps, "refresh": {"one list": stats(100 * slower)},
        "alone": {"PagedAdamW": stats(100 * slower), "torch fused": stats(300)}, "imports": {},
        "first step": {"cold": fresh, "warm": fresh, "import": fresh}, "left_out": [],
    }  # fmt: skip


def test_the_fused_bars_are_met_or_missed() -> None:
    assert [bar.met for bar in fused_tables.bars(fused_result())] == [True] * 13
    assert not any(bar.met for bar in fused_tables.bars(fused_result(slower=30)))


def test_without_a_gpu_its_bars_are_not_measured() -> None:
    result = fused_result()
    result.update(device="cpu", steps=[s for s in result["steps"] if s["device"] == "cpu"])
    met = [bar.met for bar in fused_tables.bars(result)]
    assert met.count(None) == 9
    assert met.count(True) == 4


def test_tables_show_the_share_of_the_copy() -> None:
    (headings, rows), *_ = fused_tables.tables(fused_result()).values()
    assert dict(zip(headings, rows[0], strict=True))["of the copy"] == "99.0 %"
    assert dict(zip(headings, rows[1], strict=True))["÷ ours"] == "10.00 x"


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


def test_gpt2_has_its_148_tensors() -> None:
    shapes = gpt2_shapes()
    assert len(shapes) == 148
    assert sum(map(math.prod, shapes)) == 124_439_808


@pytest.mark.parametrize(("build", "right"), [(ours(), True), (theirs(fused=True), True), (None, False)])
def test_contenders_are_held_to_float64(build: Any, right: bool) -> None:
    work = Work("small", [(5, 3), (70,), (200, 30)], torch.float32, 28, 5e-5)
    first = work.parameters(CPU)
    params = work.parameters(CPU, [p.grad for p in first if p.grad is not None])
    wrong = torch.optim.AdamW(params, lr=1.001e-3, betas=(0.9, 0.95), weight_decay=0.1)
    contender = build(params) if build else Contender(wrong.step)
    assert (Reference(first).error(params, contender) <= work.tolerance) is right


def test_every_contender_that_a_work_names_can_be_built() -> None:
    run = fused_step.Run(True, True, report.console())
    for key, work in fused_step.works(True).items():
        names = set(fused_step.contenders(run, key, cuda=True))
        assert {"PagedAdamW", "torch fused", "torch foreach"} <= names, work.name
        assert ("torch loop" in names) is (key not in ("1b", "50m", "5000"))


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


def test_a_child_that_crashes_is_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], -11, stdout="", stderr="Segmentation fault")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    (crashed,) = attempts.run_all(["foreach_norm_424"])
    assert crashed["outcome"] == "fails"
    assert "-11" in crashed["message"]
    assert crashed["as_expected"] is False
    assert attempts.run_all(["host_list"])[0]["as_expected"] is True
