"""What a run of the tests ends with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from paths import HELPERS, ROOT

INNER = """
import pytest

@pytest.mark.parametrize("i", range(40))
def test_needs(i):
    pytest.skip("no GPU" if i else "no g++")

def test_fails():
    assert False, "as planted"
"""


def test_a_run_ends_with_its_result_and_not_with_what_it_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text("\n".join([INNER, *(f"def test_{i}(): test_needs(1)" for i in range(40))]))
    config = ("-c", ROOT / "pyproject.toml", "-p", "conftest", "-p", "no:cacheprovider", "-n", "0")
    # Where CI is set, pytest shows more lines of a failure.
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k not in ("CI", "BUILD_NUMBER")
    }
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (HELPERS, ROOT / "tests", ROOT)))
    command = [sys.executable, "-m", "pytest", *map(str, config), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    *_, most, few, title, failed, result = done.stdout.splitlines()
    assert (most, few) == ("skipped 79: no GPU", "skipped 1: no g++"), done.stdout
    assert "short test summary" in title
    assert failed.startswith("FAILED ")
    assert "as planted" in failed
    assert "1 failed, 80 skipped" in result


def test_make_says_what_the_front_page_says_of_its_time() -> None:
    said = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (time,) = re.findall(r"takes (\d+ to \d+ minutes on two cores)", said)
    assert f"takes {time}" in (ROOT / "README.md").read_text()
