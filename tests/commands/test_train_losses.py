"""`python -m pagedopt train` fails where losses show that something is wrong: not finite, or rising alone."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Program, assert_has

from pagedopt.commands.train import contender, spill
from pagedopt.commands.train.compare import broken
from pagedopt.commands.train.contender import Curve
from pagedopt.commands.train.progress_report import rising


def test_losses_that_are_not_finite_fail(tmp_path: Path, train_tiny: Program) -> None:
    said = train_tiny.says("--no-spill", "--out", tmp_path, "--steps", 3, "--lr", 1e30, status=1)
    assert_has(said, "The loss of PagedAdamW is nan in step 2.", "The loss of torch AdamW (fused) is nan in step 2.")
    assert "differ by" not in said


def test_a_loss_that_rises_where_torchs_falls_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    build = contender.build_optimizer

    def climbing(kind: str, model: torch.nn.Module, options: Any) -> torch.optim.Optimizer:
        optimizer = build(kind, model, options)
        for group in optimizer.param_groups:
            group["maximize"] = kind == "paged"
        return optimizer

    monkeypatch.setattr(contender, "build_optimizer", climbing)
    asked = ("--no-spill", "--steps", 8, "--state-format", "bfloat16")
    said = train_tiny.says(*asked, "--out", tmp_path, status=1)
    assert_has(said, "That is not judged", "The loss of PagedAdamW (bfloat16) ROSE from 5.", "(fused) fell to ")


def results(**curves: tuple[float, float]) -> dict[str, dict[str, Any]]:
    return {
        kind: {"optimizer": kind, "first_train_loss": first, "final_train_loss": last}
        for kind, (first, last) in curves.items()
    }


def test_a_loss_that_rises_is_a_fault_only_beside_one_that_falls() -> None:
    assert rising(results(paged=(3.0, 3.5), torch=(3.0, 2.5))) == [
        "The loss of paged ROSE from 3.000 to 3.500; that of torch fell to 2.500."
    ]
    for curves in (results(paged=(3.0, 3.5), torch=(3.0, 3.1)), results(paged=(3.0, 2.9), torch=(3.0, 2.5)),
                   results(paged=(3.0, 3.5)), results(paged=(3.0, 3.0), torch=(3.0, 2.5))):  # fmt: skip
        assert rising(curves) == []


def test_twins_whose_losses_are_not_finite_are_not_said_to_differ() -> None:
    device = torch.device("cpu")
    twins: Any = [SimpleNamespace(name=name, curve=Curve([3.0, math.nan]), device=device) for name in spill.NAMES]
    agree, said = spill.verdict(twins)
    assert (agree, said) == (False, "The loss of resident is nan in step 2. The loss of spilled is nan in step 2.")


def test_the_first_loss_that_is_not_finite_is_named() -> None:
    assert broken({"one": [1.0, -math.inf, math.nan], "other": [1.0, 2.0]}) == ["The loss of one is -inf in step 2."]
