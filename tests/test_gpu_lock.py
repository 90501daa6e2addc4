"""The lock that keeps tests on one card out of each other's way, between real processes and in a real run of pytest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from paths import HELPERS

HOLDER = """
import os, sys, time
from pathlib import Path
from gpu_lock import Lock
folder, how = sys.argv[1:]
with Lock(Path(folder), "card").hold(how == "alone"):
    if how == "forks" and not os.fork():
        time.sleep(60)
        os._exit(0)
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
time.sleep(60 if how == "forks" else 0)
"""


class Holder:
    """A process that takes the lock and keeps it until told."""

    def __init__(self, folder: Path, how: str, stack: contextlib.ExitStack) -> None:
        command = [sys.executable, "-c", HOLDER, str(folder), how]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True
        )
        stack.callback(self.end)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)  # with what it forked
        self.process.communicate()

    def says(self, word: str) -> None:
        assert self.process.stdout is not None
        assert wait([self.process.stdout], 30), f"{word!r} does not come"
        assert self.process.stdout.readline() == word + "\n"

    def waits(self, seconds: float = 0.3) -> bool:
        """Whether it says nothing for so long."""
        return not wait([self.process.stdout], seconds)

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.says("out")


def inside(folder: Path, how: str, stack: contextlib.ExitStack) -> Holder:
    """One that has the lock."""
    holder = Holder(folder, how, stack)
    holder.says("in")
    return holder


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HELPERS)}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


def until_somebody_queues(folder: Path) -> None:
    """Return when a process holds the turnstile, as one does that waits for the lock."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with (folder / "card.turnstile").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        time.sleep(0.01)
    raise AssertionError("nobody waits for the lock")


def test_shared_ones_overlap_and_a_lone_one_is_alone_and_not_starved(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    first, second = (inside(tmp_path, "shared", stack) for _ in range(2))
    lone = Holder(tmp_path, "alone", stack)
    until_somebody_queues(tmp_path)
    late = Holder(tmp_path, "shared", stack)
    first.leave()
    assert lone.waits()
    assert late.waits(), "a late comer went in before the one that waits"
    second.leave()
    lone.says("in")
    assert late.waits()
    lone.leave()
    late.says("in")


def test_a_holder_that_dies_lets_go(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    first = inside(tmp_path, "alone", stack)
    second = Holder(tmp_path, "shared", stack)
    until_somebody_queues(tmp_path)
    first.process.kill()
    second.says("in")


def test_a_child_of_a_holder_does_not_keep_the_lock(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    inside(tmp_path, "forks", stack).leave()
    inside(tmp_path, "alone", stack)
