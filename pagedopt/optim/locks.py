"""A lock per optimizer: while one thread steps, loads or moves pages, another must not read half-changed state."""

from __future__ import annotations

import os
import threading
import weakref


class OptimizerLock:
    """A reentrant lock.  A forked child gets a fresh one: the thread that held it does not exist there.

    Attributes:
        now: the lock of this process, for a ``with`` block.
    """

    __slots__ = ("__weakref__", "now")

    def __init__(self) -> None:
        self.now = threading.RLock()
        _all.add(self)

    def __call__(self) -> threading.RLock:
        """Return :attr:`now`."""
        return self.now


_all: weakref.WeakSet[OptimizerLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock.now = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
