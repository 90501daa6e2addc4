"""How close is a step to a copy: numbers of threads, and contenders that are wrong or missing."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest
import torch
from experiment_runs import experiment

from experiments.harness.main import main
from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.step import close_to_a_copy, cpu_step, fsdp2
from experiments.works.contenders import installed, ours, theirs
from experiments.works.models import Work
from experiments.works.reference import Bound, Reference
from pagedopt.system.machine import MAX_THREADS

CPU = torch.device("cpu")


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


def test_processes_whose_losses_differ_are_not_compared() -> None:
    fsdp2.check_losses([2.0, 1.0], [2.0, 1.01])
    with pytest.raises(RuntimeError, match="losses"):
        fsdp2.check_losses([2.0, 1.1], [2.0, 1.0])


@pytest.mark.parametrize(("build", "right"), [(ours(), True), (theirs(fused=True), True), (None, False)])
def test_contenders_are_held_to_float64(build: Any, right: bool) -> None:
    work = Work("small", [(5, 3), (70,), (200, 30)], torch.float32, 28, 5e-5)
    first = work.parameters(CPU)
    params = work.parameters(CPU, [p.grad for p in first if p.grad is not None])
    wrong = torch.optim.AdamW(params, lr=1.001e-3, betas=(0.9, 0.95), weight_decay=0.1)
    contender = build(params) if build else Bound(wrong.step)
    assert (Reference(first).error(params, contender) <= work.tolerance) is right


def test_packages_that_are_missing_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = Run(CPU, True, console())
    for _ in range(2):
        assert installed(run, close_to_a_copy.ON_GPU["1000"]) == list(close_to_a_copy.ON_GPU["1000"][:5])
    assert run.left_out == ["bitsandbytes: not installed", "torchao: not installed"]
