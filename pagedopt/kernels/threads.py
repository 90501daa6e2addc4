"""Threads that share the work of one call, and leave it when it fails or is interrupted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from ..system.interrupts import Uninterrupted

#: Bounds of a stretch of work.
Share = tuple[int, int]


class _Work:
    """Stretches of work that are taken by whichever thread is free.

    A helper enters before it takes a stretch and leaves after its last; so once none is left to take, nobody works who
    has not entered.  Lists are what one thread can change while others look.
    """

    def __init__(self, call: Callable[[int, int], None], shares: list[Share]) -> None:
        self.call = call
        self._shares = shares[::-1]
        self._inside: list[None] = []
        self._errors: list[BaseException] = []
        self._left: SimpleQueue[None] = SimpleQueue()

    def take(self) -> None:
        """Work until nothing is left to take."""
        shares, call = self._shares, self.call
        while shares:
            try:
                first, last = shares.pop()
            except IndexError:  # another thread was faster
                return
            call(first, last)

    def help(self) -> None:
        """Be a helper; an error goes to the thread that waits."""
        self._inside.append(None)
        try:
            self.take()
        except BaseException as error:
            self._errors.append(error)
            self._shares.clear()
        self._inside.pop()
        self._left.put(None)

    def wait(self) -> None:
        """Return when all helpers have left.

        Raises:
            BaseException: the first that one of them has met.
        """
        while self._inside:
            self._left.get()  # comes after a helper has left
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Let nobody take more, and return when all helpers have left, however often that is interrupted."""
        try:
            with Uninterrupted():
                while self._shares or self._inside:
                    self._shares.clear()
                    time.sleep(1e-4)
        except BaseException:  # of a signal before the block or at its end; the caller raises the first one
            if self._shares or self._inside:
                self.stop()


class _Helpers:
    """Threads that wait for work; made when they are first asked for, as many as can be had."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._count = 0

    def ask(self, call: Callable[[], None], count: int) -> None:
        """Let up to ``count`` threads make a call."""
        while self._count < count:
            try:
                # Daemons: they hold nothing, and the end of the program need not wait for them.
                threading.Thread(target=self._serve, name=f"pagedopt-{self._count}", daemon=True).start()
            except RuntimeError:  # the system gives no more threads: those there are do the work
                break
            self._count += 1
        for _ in range(min(count, self._count)):
            self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get()()


def run(call: Callable[[int, int], None], shares: list[Share], count: int) -> None:
    """Make ``call(first, last)`` for every share, on this thread and ``count`` - 1 others.

    Raises:
        BaseException: of a call, or of a signal handler; by then no thread is in a call any more.
    """
    work = _Work(call, shares)
    try:
        _helpers.ask(work.help, count - 1)
        work.take()
        work.wait()
    except BaseException:
        work.stop()
        raise


_helpers = _Helpers()


def _after_fork() -> None:
    """Threads do not survive a fork; a child makes its own."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_after_fork)
