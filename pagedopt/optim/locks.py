"""One thread at a time in an optimizer: while one steps, loads or moves pages, its state is not whole for another."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Turn:
    """A lock that its thread may take again, and that a forked child finds open: whoever held it is not there."""

    __slots__ = ("_fork", "_lock")

    def __init__(self) -> None:
        self._fork, self._lock = _forks, threading.RLock()

    def __call__(self) -> threading.RLock:
        """What to hold, in a ``with`` block."""
        if self._fork != _forks:
            with _renewing:
                if self._fork != _forks:
                    self._fork, self._lock = _forks, threading.RLock()
        return self._lock


class HasTurn(Protocol):
    """Whose methods threads call in turn."""

    _turn: Turn


Own = TypeVar("Own", bound=HasTurn)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_turn(method: Callable[Concatenate[Own, Given], Result]) -> Callable[Concatenate[Own, Given], Result]:
    """A method that waits until no other thread is in one of its object's."""

    @functools.wraps(method)
    def waits(self: Own, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with self._turn():
            return method(self, *args, **kwargs)

    return waits


_forks = 0
_renewing = threading.Lock()


def _after_fork() -> None:
    global _forks, _renewing
    _forks += 1
    _renewing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

__all__ = ["HasTurn", "Turn", "in_turn"]
