"""How close is a step to a copy: a real run of toys, and what is made of its rows."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import experiment, judged, regenerated, run_quick

from experiments.harness.main import main
from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.harness.time import series
from experiments.step import close_to_a_copy, cpu_step, fsdp2, in_8_bits
from experiments.works.contenders import CONTENDERS, COPY, FUSED, OURS, installed, ours, theirs
from experiments.works.models import Work, gpt2_shapes
from experiments.works.reference import Bound, Reference
from pagedopt.system.machine import MAX_THREADS

CPU = torch.device("cpu")
FIRST_STEP = ("first step, cold cache", "first step, warm cache", "import of pagedopt.PagedAdamW")


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("fused_step", tmp_path, plots=["steps"])
    assert any("need a GPU" in line for line in found["left_out"])
    steps = found["parts"]["close_to_a_copy"]["rows"]
    assert {(row["key"], row["case"]) for row in steps} == {
        (key, case) for key in ("5000", "50m") for case in (OURS, FUSED, "torch foreach", COPY)
    }
    assert all(row["error"] < 5e-5 for row in steps if row["case"] != COPY)
    assert [row["what"] for row in found["parts"]["first_step"]["rows"]] == list(FIRST_STEP)


@pytest.mark.long
def test_a_profile_of_toys_is_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("step-profile", tmp_path)
    assert {row["count"] for row in found["parts"]["step_profile"]["rows"]} == {10, 20}


@pytest.mark.long
def test_steps_on_a_cpu_take_turns_with_torchs(tmp_path: Path) -> None:
    found = run_quick("cpu-step", tmp_path, more=["--threads", "1"])
    rows = found["parts"]["cpu_step"]["rows"]
    cases = (OURS, "torch foreach", cpu_step.AGAIN, COPY)
    assert [(row["threads"], row["case"]) for row in rows] == [
        (1, case) for _ in cpu_step.works(True) for case in cases
    ]
    assert all(row["error"] < 5e-5 for row in rows if row["case"] != COPY)
    for row in rows:
        assert {row[name]["n"] for name in ("time", "other", "ratio")} == {3}
        least, most = (row["other"][end] / row["time"][start] for end, start in (("min", "max"), ("max", "min")))
        assert least <= row["ratio"]["min"] <= row["ratio"]["max"] <= most


@pytest.mark.long
def test_steps_with_state_in_8_bits_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("in-8-bits", tmp_path, plots=["in-8-bits"])
    everything = in_8_bits.derive(Rows(found["parts"]["in_8_bits"]["rows"]))
    rows = everything.where(place="resident")
    assert [row["case"] for row in rows] == [OURS, *in_8_bits.INT8, COPY]
    assert len(everything) == len(rows) + 4, "those in a file"
    assert all(row["error"] < 0.1 for row in rows if row["case"] != COPY)
    assert rows[0]["bytes"] / rows[1]["bytes"] == pytest.approx(28 / 16.0625)


@pytest.mark.long
def test_iterations_over_two_processes_take_turns(tmp_path: Path) -> None:
    found = run_quick("fsdp2", tmp_path)
    rows = found["parts"]["fsdp2"]["rows"]
    assert [(row["case"], row["what"]) for row in rows] == [
        (case, what) for case in (OURS, "PagedAdamW, all away") for what in ("iterations", "steps")
    ]
    assert [row["away"] > 0 for row in rows] == [False, False, True, True]
    for whole, steps in (rows[:2], rows[2:]):
        for name in ("ours", "theirs"):
            assert whole[name]["n"] == steps[name]["n"] == 3
            assert 0 < steps[name]["min"] < whole[name]["max"]


def test_iterations_must_not_take_longer_and_must_learn_alike() -> None:
    (bar,) = fsdp2.BARS
    for ratio, met in ((1.04, True), (1.06, False)):
        assert bar.verdict(Rows([{"what": "iterations", "case": OURS, "ratio": stats(ratio)}])).met is met
    assert bar.verdict(Rows()).met is None
    turns = {"kind": fsdp2.TURNS, "away": 4000}
    link = {"kind": fsdp2.LINK, "bytes": 2000, "time": stats(7.0)}
    found = fsdp2.derive(Rows([link, {**turns, "what": "iterations"}, {**turns, "what": "steps"}]))
    assert [row.get("floor") for row in found] == [None, None, 14.0]
    fsdp2.check_losses([2.0, 1.0], [2.0, 1.01])
    with pytest.raises(RuntimeError, match="losses"):
        fsdp2.check_losses([2.0, 1.1], [2.0, 1.0])


@pytest.mark.parametrize("text", ["", "0", "1,-2", "two", "1,,2"])
def test_what_is_no_number_of_threads_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 on"):
        cpu_step.thread_counts(text)


def test_more_threads_than_can_be_started_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(experiment("cpu_step"), ["--quick", "--device", "cpu", "--threads", "1,100000"])
    assert f"--threads: 100000: must be at most {MAX_THREADS} here" in capsys.readouterr().err


def test_numbers_of_threads_may_be_all_there_are() -> None:
    assert cpu_step.thread_counts("3,1,3") == [1, 3]
    assert cpu_step.thread_counts("all") == [len(os.sched_getaffinity(0))]


def test_the_slowest_work_decides_on_a_cpu() -> None:
    def row(case: str, ratio: float) -> dict[str, Any]:
        return {"case": case, "bytes": 28, "time": stats(1.0), "ratio": stats(ratio)}

    (bar,) = cpu_step.BARS
    rows = [row(OURS, 1.2), row(OURS, 0.96), row("torch foreach", 0.1)]
    assert bar.verdict(cpu_step.derive(Rows(rows))).met
    assert not bar.verdict(cpu_step.derive(Rows([*rows, row(OURS, 0.94)]))).met


def test_what_is_committed_comes_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("fused_step", "nvidia-h200") == judged("fused_step", "cpu") == 13
    assert judged("step_profile", "cpu") == 0
    assert judged("in_16_bits", "nvidia-h200") == judged("cpu_step", "cpu") == 1
    assert judged("captured_step", "nvidia-h200") == 4
    assert judged("in_8_bits", "nvidia-h100-80gb-hbm3") == 8
    for page in ("fused_step", "captured_step"):
        regenerated(page, tmp_path, monkeypatch)


def stats(median: float, clock: str = "wall") -> dict[str, Any]:
    return series([median] * 9, clock)


def made_up(slower: float = 1.0, device: str = "cuda") -> dict[str, list[dict[str, Any]]]:
    """Rows of a machine on which every bar is met, unless PagedAdamW takes ``slower`` times as long."""
    mine = 100 * slower
    works = [(key, "cuda") for key in ("gpt2", "1b", "gpt2-bf16", "1000", "5000")] + [("5000", "cpu"), ("50m", "cpu")]
    steps = [
        {"key": key, "work": key, "device": on, "numel": 1, "bytes": 28, "case": case, "error": None,
         "host": stats(best, "host"), "wall": stats(best), "gpu": stats(best, "GPU")}
        for key, on in works if on in ("cpu", device)
        for case, best in ((OURS, mine), (FUSED, 1000.0), (COPY, 99.0))
    ]  # fmt: skip
    fresh = stats(0.1 * slower)
    return {
        "close_to_a_copy": steps,
        "host_time": [
            {"what": "step() alone", "device": device, "case": OURS, "host": stats(mine)},
            {"what": "refresh", "device": device, "case": "one list", "host": stats(mine)},
        ],
        "first_step": [{"what": name, "device": device, "seconds": fresh} for name in FIRST_STEP],
    }


def met(found: dict[str, list[dict[str, Any]]]) -> list[bool | None]:
    asked = experiment("fused_step").questions
    return [bar.verdict(q.derive(Rows(found[q.name]))).met for q in asked for bar in q.listed("BARS")]


def test_the_bars_are_met_or_missed() -> None:
    assert met(made_up()) == [True] * 13
    assert not any(met(made_up(slower=30)))


def test_without_a_gpu_its_bars_are_not_measured() -> None:
    found = met(made_up(device="cpu"))
    assert found.count(None) == 9
    assert found.count(True) == 4


def test_tables_show_the_share_of_the_copy() -> None:
    (table,) = close_to_a_copy.TABLES
    (_, headings, lines), *_ = table.shown(close_to_a_copy.derive(Rows(made_up()["close_to_a_copy"])))
    assert dict(zip(headings, lines[0], strict=True))["of the copy"] == "99.0 %"
    assert dict(zip(headings, lines[1], strict=True))["÷ ours"] == "10.00 x"


def test_on_a_cpu_a_copy_is_no_floor() -> None:
    for name in ("cuda", "cpu"):
        rows = close_to_a_copy.derive(Rows({**row, "device": name} for row in made_up()["close_to_a_copy"]))
        shown = {row["share"] is not None for row in rows.where(key="gpt2")}
        assert shown == {name == "cuda"}


def test_torch_s_share_is_that_of_the_bytes_it_moves() -> None:
    rows = Rows({**row, "bytes": 22} for row in made_up()["close_to_a_copy"]).where(key="gpt2-bf16")
    mine, fused, copy = close_to_a_copy.derive(rows)
    assert (mine["label"], fused["label"]) == (OURS, f"{FUSED}, bf16 moments")
    assert mine["share"] == pytest.approx(99)
    assert fused["share"] == pytest.approx(9.9 * 14 / 22)
    assert copy["share"] == 100


def test_a_loop_without_gpu_times_is_held_to_our_wall() -> None:
    rows = Rows(made_up()["close_to_a_copy"]).where(key="1000")
    rows[1] |= {"gpu": None, "wall": stats(5000.0)}
    rows[0] |= {"wall": stats(500.0)}
    _, loop, _ = close_to_a_copy.derive(rows)
    assert (loop["clock"], loop["of_ours"], loop["name"]) == ("wall", 10.0, f"{FUSED}, wall")


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
    contender = build(params) if build else Bound(wrong.step)
    assert (Reference(first).error(params, contender) <= work.tolerance) is right


def test_every_contender_that_a_work_names_can_be_built() -> None:
    works = close_to_a_copy.works(True)
    for key, names in [*close_to_a_copy.ON_GPU.items(), *close_to_a_copy.ON_CPU.items()]:
        assert key in works
        assert {OURS, FUSED, "torch foreach"} <= set(names) <= set(CONTENDERS), key
        assert ("torch loop" in names) is (key not in ("1b", "50m", "5000"))


def test_packages_that_are_missing_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = Run(CPU, True, console())
    for _ in range(2):
        assert installed(run, close_to_a_copy.ON_GPU["1000"]) == list(close_to_a_copy.ON_GPU["1000"][:5])
    assert run.left_out == ["bitsandbytes: not installed", "torchao: not installed"]
