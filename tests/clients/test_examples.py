"""The programs in ``examples/`` do what they say."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import clients
import pytest
import torch
import torchvision_operators
from children import python, run
from paths import ROOT

EXAMPLES = ROOT / "examples"


#: Lightning's own variables: as on a machine with two devices, and with one.
TWO_DEVICES = {"PL_TRAINER_ACCELERATOR": "cpu", "PL_TRAINER_DEVICES": "2"}
ONE_DEVICE = {"PL_TRAINER_DEVICES": "1"}
#: Names, and packages that they need.
TRAINING = [
    pytest.param("loop", "torch"),
    pytest.param("in_8_bits", "torch"),
    pytest.param("hf_trainer", "transformers", marks=pytest.mark.clients),
    pytest.param("accelerate_loop", "accelerate", marks=pytest.mark.clients),
    pytest.param("lightning_fit", "lightning", marks=pytest.mark.clients),
]


@pytest.mark.parametrize(("name", "package"), TRAINING)
def test_an_example_trains_and_goes_on(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice in this process."""
    needed(package)
    monkeypatch.chdir(tmp_path)
    check(*[lambda: here(name, capfd)] * 2)


@pytest.mark.long
@pytest.mark.parametrize(("name", "package"), TRAINING)
def test_an_example_is_a_program(name: str, package: str, tmp_path: Path) -> None:
    needed(package)
    check(*[lambda: program(name, tmp_path)] * 2)


@pytest.mark.long
@pytest.mark.clients
@pytest.mark.parametrize("again", ["on one device", "on two devices"])
def test_an_example_starts_more_processes_of_what_runs_it(
    again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What two have saved goes on."""
    needed("lightning")
    monkeypatch.chdir(tmp_path)

    def on_two() -> str:
        return program("lightning_fit", tmp_path, **TWO_DEVICES)

    check(on_two, on_two if again == "on two devices" else lambda: here("lightning_fit", capfd))


def needed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def here(name: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What an example says, run in this process."""
    torchvision_operators.declare()
    clients.forget_accelerate()
    try:
        with unittest.mock.patch.dict(os.environ, ONE_DEVICE):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        clients.forget_accelerate()
    return capfd.readouterr().out


def program(name: str, folder: Path, **variables: str) -> str:
    """What an example says in a process of its own."""
    return python(torchvision_operators.__file__, EXAMPLES / f"{name}.py", cwd=folder, **variables)


def check(*runs: Callable[[], str]) -> None:
    """Run an example twice, and look at the losses of both."""
    found: list[list[float]] = []
    for once in runs:
        said = once()
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


def test_the_example_of_seven_billion_learns_its_text_when_it_is_small(tmp_path: Path) -> None:
    done = run(EXAMPLES / "seven_billion.py", "--small", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]
    assert ("56.0 MiB on host" if torch.cuda.is_available() else "45.1 MiB on file") in done.stdout


@pytest.mark.parametrize(("options", "nearer", "farther"), [("", 1e-6, 0), ("--state-format int8", 0.02, 1e-4)])
def test_the_example_beside_torch_says_how_far_they_are_apart(
    options: str, nearer: float, farther: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["beside_torch.py", "--device-budget", "0", *options.split()])
    said = here("beside_torch", capfd)
    apart, theirs, ours, moved = map(float, re.findall(r"(?<= )\d[\d.e-]+(?=\n| apart|, ours| at most)", said)[:4])
    assert farther < apart < nearer
    assert farther < ours < nearer
    assert 0 < theirs < 1e-6
    assert moved > 0.05
    assert ("(mapped, budget 0" if torch.cuda.is_available() else "(file, budget 0") in said


def test_examples_are_short() -> None:
    assert not [path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) > 60]


def test_what_an_example_needs_first_is_said() -> None:
    for name, package in {"accelerate_loop": "accelerate", "hf_trainer": "transformers",
                          "lightning_fit": "lightning"}.items():  # fmt: skip
        text = (EXAMPLES / f"{name}.py").read_text()
        assert "pip install -e '.[clients]'" in (ast.get_docstring(ast.parse(text)) or "")
        with unittest.mock.patch.dict(sys.modules, {package: None}), pytest.raises(SystemExit) as ended:  # not there
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert re.fullmatch(rf".*{package}.*; first: pip install -e '\.\[clients\]'", str(ended.value))
    with unittest.mock.patch.dict(os.environ):
        os.environ.pop("RANK", None)
        done = run("examples/fsdp2.py", cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.endswith("error: start it with torchrun --nproc-per-node 2 examples/fsdp2.py\n")
