"""The slices of the long tests: each long test is in one of them, and a night runs one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT
from slices import SLICES, VARIABLE, Slice, slice_of


def items(count: int) -> list[Any]:
    """Tests of which every third is not long."""
    marker = {"long": object()}
    return [
        SimpleNamespace(nodeid=f"tests/test_a.py::test_b[µ-{n}]", get_closest_marker=({} if n % 3 == 0 else marker).get)
        for n in range(count)
    ]


def test_each_long_test_is_in_one_slice() -> None:
    known, gone = items(3000), list[Any]()
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    in_slices = Counter[str]()
    for number in range(SLICES):
        gone.clear()
        left = list(known)
        Slice(number).pytest_collection_modifyitems(config, left)
        assert sorted(item.nodeid for item in left + gone) == sorted(item.nodeid for item in known)
        assert 50 < len(left) < 150, "slices are about as large as each other"
        in_slices.update(item.nodeid for item in left)
    assert in_slices == {item.nodeid: 1 for n, item in enumerate(known) if n % 3}


def test_a_slice_is_the_same_everywhere() -> None:
    """On any machine, in any process: 0xe1de0c67 and 0x334a0512 modulo 20."""
    assert [slice_of("tests/test_a.py::test_b"), slice_of("tests/test_a.py::test_b[µ-1]")] == [7, 18]


def collected(number: str) -> subprocess.CompletedProcess[str]:
    """What pytest says of a file with two long tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    command.append("tests/test_ignored_interrupts.py")
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, VARIABLE: number}, capture_output=True, text=True, check=False
    )


def test_a_run_of_a_slice_says_its_number() -> None:
    name = "tests/test_ignored_interrupts.py::test_tests_can_be_interrupted_all_the_same"
    number = slice_of(f"{name}[here]")
    said = collected(str(number)).stdout
    assert f"PAGEDOPT_SLICE={number} make test-long" in said
    assert "test_tests_can_be_interrupted_all_the_same[here]" in said
    assert ("[workers]" in said) is (slice_of(f"{name}[workers]") == number)
    assert "test_a_run_that" not in said, "what make test runs is left to it"


@pytest.mark.parametrize("number", ["20", "-1", "one", ""])
def test_what_is_no_slice_is_refused(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, number)
    with pytest.raises(pytest.UsageError, match=f"'{number}'; give a number from 0 to 19"):
        Slice.asked_for()
    monkeypatch.delenv(VARIABLE)
    assert Slice.asked_for() is None


def test_a_night_runs_the_slice_of_its_day() -> None:
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert f"$(date +%s) / 86400 % {SLICES}" in workflow
    assert "run: make test-long" in workflow
