"""The programs in ``examples/`` do what they say."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import clients
import pytest
import torchvision_operators
from paths import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("loop", "torch"),
        pytest.param("hf_trainer", "transformers", marks=pytest.mark.clients),
        pytest.param("accelerate_loop", "accelerate", marks=pytest.mark.clients),
        pytest.param("lightning_fit", "lightning", marks=pytest.mark.clients),
    ],
)
def test_an_example_trains_and_goes_on(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchvision_operators.declare()
    pytest.importorskip(package, reason=f"{package} is not installed")
    clients.forget_accelerate()
    monkeypatch.chdir(tmp_path)
    found: list[list[float]] = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        said = capsys.readouterr().out
        assert "optimizer state" in said
        found.append([float(number) for number in re.findall(r"\bloss'?:? '?([\d.]+)", said)])
    first, second = found
    assert first
    assert second[-1] < first[-1], "the second run has learned no more than the first one"
    assert second[0] < first[0], "the second run has begun where the first one did"


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
