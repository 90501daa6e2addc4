"""Threads that share the work of one call, and leave it when it fails or is interrupted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from ..system.interrupts import Uninterrupted

#: Bounds of a stretch of work.
Share = tuple[int, int]


@dataclass(eq=False)
class _Work:
    """Stretches of work that are taken by whichever thread is free.

    A helper enters before it takes a stretch and leaves after its last; so once none is left to take, nobody works who
    has not entered.  Lists are what one thread can change while others look.

    Attributes:
        shares: what is left to take, from the end.
        inside: one for each helper that is.
        errors: that helpers have met.
        left: one for each helper that has.
    """

    call: Callable[[int, int], None]
    shares: list[Share]
    inside: list[None] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    left: SimpleQueue[None] = field(default_factory=SimpleQueue)

    def take(self) -> None:
        """Work until nothing is left to take."""
        shares, call = self.shares, self.call
        while shares:
            try:
                first, last = shares.pop()
            except IndexError:  # another thread was faster
                return
            call(first, last)

    def help(self) -> None:
        """Be a helper; an error goes to the thread that waits."""
        self.inside.append(None)
        try:
            self.take()
        except BaseException as error:
            self.errors.append(error)
            self.shares.clear()
        self.inside.pop()
        self.left.put(None)

    def stop(self) -> None:
        """Let nobody take more, and return when all helpers have left, however often that is interrupted."""
        try:
            with Uninterrupted():
                while self.shares or self.inside:
                    self.shares.clear()
                    time.sleep(1e-4)
        except BaseException:  # of a signal before the block or at its end; the caller raises the first one
            if self.shares or self.inside:
                self.stop()


class _Helpers:
    """``count`` threads that take from ``calls``; made when first needed, as far as the system gives them."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.count = 0

    def grow(self, count: int) -> None:
        """Be ``count`` threads."""
        while self.count < count:
            try:
                # Daemons: they hold nothing, and the end of the program need not wait for them.
                threading.Thread(target=self._serve, name=f"pagedopt-{self.count}", daemon=True).start()
            except RuntimeError:  # the system gives no more threads: those there are do the work
                break
            self.count += 1

    def _serve(self) -> None:
        while True:
            self.calls.get()()


def run(call: Callable[[int, int], None], shares: list[Share], count: int) -> None:
    """Make ``call(first, last)`` for every share, on this thread and ``count`` - 1 others.

    Raises:
        BaseException: of a call, or of a signal handler; by then no thread is in a call any more.
    """
    work, helpers = _Work(call, shares[::-1]), _helpers
    try:
        if helpers.count < count - 1:
            helpers.grow(count - 1)
        for _ in range(min(helpers.count, count - 1)):
            helpers.calls.put(work.help)
        work.take()
        while work.inside:
            work.left.get()  # comes after a helper has left
        if work.errors:
            raise work.errors[0]
    except BaseException:
        work.stop()
        raise


_helpers = _Helpers()


def _after_fork() -> None:
    """Threads do not survive a fork; a child makes its own."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_after_fork)
