"""The programs in ``examples/`` do what they say."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision_operators
from children import python
from paths import ROOT

EXAMPLES = ROOT / "examples"


#: Lightning's own variables: as on a machine with two devices.
TWO_DEVICES = {"PL_TRAINER_ACCELERATOR": "cpu", "PL_TRAINER_DEVICES": "2"}


@pytest.mark.parametrize(
    ("name", "package", "variables"),
    [
        ("loop", "torch", {}),
        ("in_8_bits", "torch", {}),
        pytest.param("hf_trainer", "transformers", {}, marks=pytest.mark.clients),
        pytest.param("accelerate_loop", "accelerate", {}, marks=pytest.mark.clients),
        pytest.param("lightning_fit", "lightning", {}, marks=pytest.mark.clients),
        pytest.param("lightning_fit", "lightning", TWO_DEVICES, marks=pytest.mark.clients, id="lightning_fit-two"),
    ],
)
def test_an_example_trains_and_goes_on(name: str, package: str, variables: dict[str, str], tmp_path: Path) -> None:
    """As a program: it may start more processes of what runs it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found: list[list[float]] = []
    for _ in range(2):
        program = (torchvision_operators.__file__, EXAMPLES / f"{name}.py")
        said = python(*program, cwd=tmp_path, **variables)
        assert said.count("optimizer state") == 1
        found.append([float(number) for number in re.findall(r"\bloss'?:? '?([\d.]+)", said)])
    first, second = found
    assert first
    assert second[-1] < first[-1], "the second run has learned no more than the first one"
    assert second[0] < first[0], "the second run has begun where the first one did"


def test_the_example_of_overlap_hides_pages(tmp_path: Path) -> None:
    said = python(EXAMPLES / "overlap.py", cwd=tmp_path, PYTHONPATH=str(ROOT))
    hidden, waited = map(int, re.findall(r"(?:hidden|waited)=(\d+)", said))
    assert hidden > waited > 0
    assert "plain=Counter()" in said


def test_examples_are_short() -> None:
    assert not [path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) > 60]


def test_what_an_example_needs_first_is_said() -> None:
    for name in ("accelerate_loop", "hf_trainer", "lightning_fit"):
        text = (EXAMPLES / f"{name}.py").read_text()
        assert "pip install -e '.[clients]'" in (ast.get_docstring(ast.parse(text)) or "")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/fsdp2.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.endswith("error: start it with torchrun --nproc-per-node 2 examples/fsdp2.py\n")
