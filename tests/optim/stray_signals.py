"""SIGINT from another process at random times: between any two instructions, in C, and in the middle of a wait."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any
from unittest import mock

#: Sends one signal for each line, which says how many seconds it may wait; answers when it has.
SENDER = """
import os, random, signal, sys, time
times = random.Random(int(sys.argv[1]))
for line in sys.stdin:
    time.sleep(times.uniform(0, float(line)))
    os.kill(os.getppid(), signal.SIGINT)
    print(flush=True)
"""
Call = Callable[[Callable[[], object], float], bool]


@contextlib.contextmanager
def stray_signals(seed: int) -> Iterator[Call]:
    """Yield a caller of functions, in each of which this process gets SIGINT once, before so many seconds have passed.

    It returns whether that rose.  If the function has ended before, the signal does nothing.
    """
    armed = False

    def handler(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    command = [sys.executable, "-S", "-c", SENDER, str(seed)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    requests: IO[bytes] = sender.stdin  # type: ignore[assignment]
    answers: IO[bytes] = sender.stdout  # type: ignore[assignment]

    def call(function: Callable[[], object], most: float) -> bool:
        nonlocal armed
        requests.write(f"{most}\n".encode())
        try:
            armed = True
            function()
        except KeyboardInterrupt:
            return True
        finally:
            armed = False
            answers.readline()
        return False

    before = signal.signal(signal.SIGINT, handler)
    try:
        with sender, mock.patch.object(sys, "unraisablehook"):  # it may rise in a finalizer
            yield call
            requests.close()
    finally:
        sender.kill()
        signal.signal(signal.SIGINT, before)
