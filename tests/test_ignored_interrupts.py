"""SIGINT ignored on entry, as a shell without job control starts its background jobs: `sh -c 'make test & wait'`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import HELPERS, ROOT

INNER = """
import signal, subprocess, sys
import pytest

def test_here():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

def test_in_a_child():
    code = "import signal; signal.raise_signal(signal.SIGINT)"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == -signal.SIGINT
"""


@pytest.mark.long
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["here", "workers"])
def test_tests_can_be_interrupted_all_the_same(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *workers, str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS), str(ROOT / "tests"), str(ROOT)])
    shell = ["sh", "-c", '"$@" & wait $!', "sh", *command]
    done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that writes a checkpoint every few steps, started with SIGINT ignored."""
    options = "--size tiny --device cpu --threads 1 --steps 100000 --checkpoint-every 5 --no-spill"
    shell = f'trap "" INT; exec "$0" -m pagedopt train {options} --out "$1"'
    command = ["sh", "-c", shell, sys.executable, str(tmp_path)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def until_saved(run: subprocess.Popen[str], path: Path) -> None:
    """Wait until another checkpoint is there than now."""
    before = path.stat().st_ino if path.exists() else 0
    deadline = time.monotonic() + 100
    while not path.exists() or path.stat().st_ino == before:
        assert run.poll() is None, f"the run has ended with {run.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_training_is_out_of_reach_of_ctrl_c_and_heeds_a_termination(
    training: subprocess.Popen[str], tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoint.pt"
    until_saved(training, saved)
    training.send_signal(signal.SIGINT)
    for _ in range(3):
        until_saved(training, saved)
    training.send_signal(signal.SIGTERM)
    said = training.communicate(timeout=60)[0]
    assert training.returncode == 130
    assert "interrupted after step" in said
