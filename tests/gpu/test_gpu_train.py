"""`python -m pagedopt train` on a GPU: gradients add up in one order, and a budget changes no bit of a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import Program, assert_has
from gpu_support import NEEDED

from pagedopt.planning.sizes import DEFAULT_SIZE

pytestmark = NEEDED


@pytest.fixture(autouse=True)
def arithmetic() -> Iterator[None]:
    """That of the tests, behind the command as before."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("budget", ["25%", "0"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_a_budget_changes_no_bit_of_a_training(
    optimizer: str, budget: str, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEFAULT_SIZE, "cuda", "tiny")
    options = ("--optimizer", optimizer, "--device-budget", budget, "--steps", 16, "--out", tmp_path)
    said = program.says("train", "--device", "cuda", *options)
    assert_has(said, "state on device", "state on host", "The budget has changed no bit of 16 losses")
    assert ("The curves agree" in said) == (optimizer == "adamw")
