"""SIGINT ignored on entry, as a shell without job control starts its background jobs: `sh -c 'make test & wait'`."""

from __future__ import annotations

import os
import subprocess
import sys
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
