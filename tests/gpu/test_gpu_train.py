"""`python -m pagedopt train` on a GPU: gradients add up in one order, and a budget changes no bit of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import python
from command_line import assert_has
from gpu_support import NEEDED

pytestmark = NEEDED

#: A process of its own: cuBLAS asks once how much it may keep to one order, and the order stays.
TINY = """
import sys
from pagedopt.commands.main import main
from pagedopt.planning.sizes import DEFAULT_SIZE
DEFAULT_SIZE["cuda"] = "tiny"
sys.exit(main(["train", "--device", "cuda", "--steps", "16", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("optimizer", "budget", "state_format"), [("adamw", "25%", "float32"), ("lion", "0", "int8")])
def test_a_budget_changes_no_bit_of_a_training(optimizer: str, budget: str, state_format: str, tmp_path: Path) -> None:
    options = ("--optimizer", optimizer, "--device-budget", budget, "--state-format", state_format, "--out", tmp_path)
    said = python("-c", TINY, *options)
    assert_has(said, "state on device", "state on host", "The budget has changed no bit of 16 losses")
    assert ("The curves agree" in said) == (optimizer == "adamw")
