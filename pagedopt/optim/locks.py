"""A lock per optimizer: while one thread steps, loads or moves pages, another must not read half-changed state."""

from __future__ import annotations

import os
import threading


class OptimizerLock:
    """A reentrant lock.  A forked child gets a fresh one: the thread that held it does not exist there."""

    __slots__ = ("_fork", "_rlock")

    def __init__(self) -> None:
        self._fork, self._rlock = _forks, threading.RLock()

    def __call__(self) -> threading.RLock:
        """Return the lock, for a ``with`` block."""
        return self._rlock if self._fork == _forks else self._renewed()

    def _renewed(self) -> threading.RLock:
        with _renewing:
            if self._fork != _forks:
                self._fork, self._rlock = _forks, threading.RLock()
        return self._rlock


_forks = 0
_renewing = threading.Lock()


def _after_fork() -> None:
    global _forks, _renewing
    _forks += 1
    _renewing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
