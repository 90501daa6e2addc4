"""Threads that share the work of one call, and stop when it fails or is interrupted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from ..system.interrupts import Uninterrupted
from ..tables.layout import Span


@dataclass(eq=False)
class _Work:
    """Spans that free threads take one by one, from the end; operations on its lists and queue are atomic."""

    call: Callable[[int, int], None]
    spans: list[Span]
    # One entry per helper at work.  A helper enters before it takes a span and leaves after its last: once ``spans`` is
    # empty, no helper outside can be working.
    inside: list[None] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    left: SimpleQueue[None] = field(default_factory=SimpleQueue)  # one entry per helper that has finished

    def take(self) -> None:
        """Take spans and work on them until none is left."""
        spans, call = self.spans, self.call
        while spans:
            try:
                first, last = spans.pop()
            except IndexError:  # another thread was faster
                return
            call(first, last)

    def help(self) -> None:
        """Take spans as a helper thread; :func:`run` raises its error."""
        self.inside.append(None)
        try:
            self.take()
        except BaseException as error:
            self.errors.append(error)
            self.spans.clear()
        self.inside.pop()
        self.left.put(None)

    def stop(self) -> None:
        """Drop the remaining spans and return when all helpers have left, even if interrupted repeatedly."""
        try:
            with Uninterrupted():
                while self.spans or self.inside:
                    self.spans.clear()
                    time.sleep(1e-4)
        except BaseException:  # a signal just before or at the end of the block; the caller raises the first error
            if self.spans or self.inside:
                self.stop()


class _Helpers:
    """``count`` threads that run what is put into ``calls``."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.count = 0

    def grow(self, count: int) -> None:
        """Start threads until there are ``count``, or the system refuses more."""
        while self.count < count:
            try:
                # Daemons: they hold no resources, and the program's exit need not wait for them.
                threading.Thread(target=self._serve, name=f"pagedopt-{self.count}", daemon=True).start()
            except RuntimeError:  # no more threads: the existing ones do the work
                break
            self.count += 1

    def _serve(self) -> None:
        while True:
            self.calls.get()()


def run(call: Callable[[int, int], None], spans: list[Span], count: int) -> None:
    """Make ``call(first, last)`` for every span, on ``count`` threads; raise errors once no thread is in a call."""
    work, helpers = _Work(call, spans[::-1]), _helpers
    try:
        if helpers.count < count - 1:
            helpers.grow(count - 1)
        for _ in range(min(helpers.count, count - 1)):
            helpers.calls.put(work.help)
        work.take()
        while work.inside:
            work.left.get()  # a helper leaves ``inside`` first
        if work.errors:
            raise work.errors[0]
    except BaseException:
        work.stop()
        raise


_helpers = _Helpers()


def _after_fork() -> None:
    """Start afresh in a forked child: threads do not survive a fork."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_after_fork)
