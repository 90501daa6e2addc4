"""A lock per optimizer: while one thread steps, loads or moves pages, another must not read half-changed state."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from .overlap.overlap import Overlap
from .overlap.within import Within
from .rule_optimizer import RuleOptimizer


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


class LockedOptimizer(RuleOptimizer):
    """An optimizer whose methods are decorated with :func:`locked`."""

    _lock: OptimizerLock
    _overlap: Overlap | None = None
    _within: Within | None = None


#: Methods that are allowed between the first gradient of a backward that updates and ``step()``: they read no state.
MIDWAY = {"_step", "wait", "memory_report", "overlap_report"}
Own = TypeVar("Own", bound=LockedOptimizer)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def locked(method: Callable[Concatenate[Own, Given], Result]) -> Callable[Concatenate[Own, Given], Result]:
    """Decorate a method to hold its object's lock while it runs, and to wait for a queued step before.

    It raises RuntimeError in the middle of a step within a backward, unless it is one of :data:`MIDWAY`.
    """
    name = method.__name__
    midway = name in MIDWAY

    @functools.wraps(method)
    def waits(self: Own, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        lock = self._lock
        with lock._rlock if lock._fork == _forks else lock():  # lock(), written out: every step takes it
            if self._overlap is not None:
                self._overlap.wait()
            if self._within is not None and not midway:
                self._within.refuse(name.strip("_"))
            return method(self, *args, **kwargs)

    return waits


_forks = 0
_renewing = threading.Lock()


def _after_fork() -> None:
    global _forks, _renewing
    _forks += 1
    _renewing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

__all__ = ["LockedOptimizer", "OptimizerLock", "locked"]
