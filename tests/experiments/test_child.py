"""A function in a process of its own: what it yields comes back, however it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import toy_child
from paths import ROOT

from experiments import child

HELPERS = {"PYTHONPATH": str(Path(toy_child.__file__).parent)}


def start(function: Any, *arguments: Any, limit: float = 60, **more: Any) -> child.Child:
    return child.Child(function, *arguments, limit=limit, **{"environment": HELPERS, **more})


def test_rows_come_back_from_another_process() -> None:
    process = start(toy_child.count, 3)
    rows = list(process)
    assert [row["n"] for row in rows] == [0, 1, 2]
    assert {row["pid"] for row in rows} == {process.pid} != {os.getpid()}
    assert process.ended is None


@pytest.mark.parametrize(
    ("function", "words"), [(toy_child.crash, f"ended with {-signal.SIGABRT}: "), (toy_child.fail, "ended with 1: ")]
)
def test_rows_of_a_child_that_dies_are_kept(function: Any, words: str) -> None:
    process = start(function)
    assert list(process) == [{"n": 0}]
    assert process.ended is not None
    assert process.ended.startswith(words)
    assert ("ValueError: of no use" in process.ended) is (function is toy_child.fail)
    with pytest.raises(RuntimeError, match=f"the process of {function.__name__} {words}"):
        child.only(function, limit=60, environment=HELPERS)


def test_a_child_that_never_ends_is_stopped() -> None:
    process = start(toy_child.hang, limit=2)
    begin = time.monotonic()
    assert list(process) == [{"n": 0}]
    assert time.monotonic() - begin < 30
    assert process.ended == "was stopped after 2 s"


def test_who_is_no_longer_listened_to_is_ended() -> None:
    process = start(toy_child.hang)
    rows = iter(process)
    assert next(rows) == {"n": 0}
    rows.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_child_has_the_variables_it_is_given() -> None:
    assert list(start(toy_child.seen, environment={**HELPERS, "TOY": "x"})) == [{"tree": str(ROOT), "variable": "x"}]


def test_only_what_a_child_can_import_is_called() -> None:
    with pytest.raises(ValueError, match="a child calls a function of a module"):
        child.Child(lambda: iter(()), limit=1)
    with pytest.raises(RuntimeError, match="gave 2 rows, not one"):
        child.only(toy_child.count, 2, limit=60, environment=HELPERS)
