"""Blocks in which no Python signal handler runs; handlers that were due run at the end of the block.

Python runs signal handlers in the main thread between any two of its instructions, and the one for Ctrl-C raises.  A
step, a move of pages or a load that is interrupted in the middle would lose state.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import compress
from types import FrameType
from typing import Any

from .internals import handler_of, set_handler

Handler = Callable[[int, FrameType | None], Any]

#: Signals for which a program may have handlers.  The others end or stop it, or come from its own faults.
_NAMES = "HUP INT QUIT USR1 USR2 ALRM TERM CHLD CONT TSTP URG VTALRM PROF WINCH IO PIPE TTIN TTOU XCPU"
_SIGNALS = tuple([int(signal.Signals[f"SIG{name}"]) for name in _NAMES.split()])


def _defer_or_call(original: Handler, number: int, frame: FrameType | None) -> None:
    """Stand in for a handler: defer the signal while a block is open, else call the handler."""
    if _open is None:
        original(number, frame)
    else:
        _open.defer(number, original, frame)


class Uninterrupted:
    """A ``with`` block in which no Python signal handler runs; those that were due run at its end, once each.

    A block inside another one changes nothing, nor does a block in another thread, where Python runs no handlers.

    Args:
        gives_way: a second SIGINT ends the protection, and its handler runs inside the block.
    """

    def __init__(self, gives_way: bool = False) -> None:
        self._gives_way = gives_way
        self._due: dict[int, tuple[Handler, FrameType | None]] = {}
        self._replaced: list[tuple[int, Handler]] = []

    def __enter__(self) -> Uninterrupted:
        global _open
        if _open is None and threading.get_ident() == threading.main_thread().ident:
            try:
                for number in compress(_SIGNALS, map(callable, map(handler_of, _SIGNALS))):
                    original = handler_of(number)
                    if isinstance(original, partial) and original.func is _defer_or_call:
                        original = original.args[0]  # an interrupt has left our stand-in there
                    self._replaced.append((number, original))
                    set_handler(number, partial(_defer_or_call, original))
                _open = self  # a handler can interrupt up to here; from here on it is deferred
            except BaseException:
                self._restore()
                raise
        return self

    def defer(self, number: int, handler: Handler, frame: FrameType | None) -> None:
        """Call ``handler`` at the end; or now, with all that are due, if this is a second SIGINT that may end it."""
        again = number in self._due
        self._due[number] = (handler, frame)
        if again and number == signal.SIGINT and self._gives_way:
            self.__exit__()  # before the handler raises: the interrupted code may not reach its __exit__

    def __exit__(self, *_: object) -> None:
        """End the protection and call the handlers that are due.  A second call does nothing."""
        global _open
        if _open is not self:
            return
        try:
            try:
                _open = None
                self._restore()
            finally:  # a handler that is back in place may have interrupted _restore() or this function
                if self._replaced:
                    self._restore()
        finally:
            if self._replaced:
                self._restore()
            if self._due:
                self._hand_on()

    def _hand_on(self) -> None:
        """Call each handler even if others raise, and drop the frames, which would form a reference cycle."""
        if self._due:
            number, (handler, frame) = self._due.popitem()
            try:
                handler(number, frame)
            finally:
                self._hand_on()

    def _restore(self) -> None:
        """Put all handlers back, even if one that is back already raises meanwhile."""
        try:
            while self._replaced:
                set_handler(*self._replaced[-1])
                self._replaced.pop()
        finally:
            if self._replaced:
                self._restore()


_open: Uninterrupted | None = None
