"""Threads beside the one of a test, a lock that another one holds, and a child that is forked meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


def together(*acts: Callable[[], Any]) -> list[BaseException]:
    """What the acts raise, each in a thread of its own."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(acts))

    def run(act: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            act()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def forked(act: Callable[[], Any]) -> bool:
    """Whether a forked child does it without an error, in 20 seconds, and finds it true."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(20)
            code = 0 if act() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def held_by_another(lock: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """A block in which a thread of its own holds ``lock``; a child that is forked there has no such thread."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
