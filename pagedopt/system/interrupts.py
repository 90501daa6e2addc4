"""Stretches of work that no signal handler may tear: handlers run when they have ended.

Python runs signal handlers in the main thread, between any two of its instructions, and Ctrl-C is one that raises.
A step, a move of pages or a load that is torn there has lost something.  So handlers wait outside of such a stretch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import compress
from types import FrameType, TracebackType
from typing import Any

from .internals import handler_of, set_handler

Handler = Callable[[int, FrameType | None], Any]

#: Those that a program may have handlers for.  The others end it, stop it, or come from its own faults.
_SIGNALS = tuple(
    int(number)
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGTERM,
        signal.SIGCHLD,
        signal.SIGCONT,
        signal.SIGTSTP,
        signal.SIGURG,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGWINCH,
        signal.SIGIO,
        signal.SIGPIPE,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGXCPU,
    )
)


def _keep_or_call(original: Handler, number: int, frame: FrameType | None) -> None:
    """In the place of a handler: keeps its signal while a block is open, and hands it on otherwise."""
    if _open is None:
        original(number, frame)
    else:
        _open.keep(number, original, frame)


def _original(handler: Handler) -> Handler:
    """What a handler stands for."""
    ours = isinstance(handler, partial) and handler.func is _keep_or_call
    return handler.args[0] if ours else handler  # type: ignore[attr-defined]


class Uninterrupted:
    """A ``with`` block in which no signal handler of Python runs; those that were called for run at its end.

    A block inside of a block, or in another thread than the main one (where no handler runs), changes nothing.

    Args:
        gives_way: a second SIGINT ends the protection, and its handler is called inside of the block.
    """

    def __init__(self, gives_way: bool = False) -> None:
        self._gives_way = gives_way
        self._kept: dict[int, tuple[Handler, FrameType | None]] = {}
        self._replaced: list[tuple[int, Handler]] = []

    def __enter__(self) -> Uninterrupted:
        global _open
        if _open is None and threading.get_ident() == threading.main_thread().ident:
            try:
                for number in compress(_SIGNALS, map(callable, map(handler_of, _SIGNALS))):
                    original = handler_of(number)
                    if isinstance(original, partial):  # one of ours, which an interrupt has left
                        original = _original(original)
                    self._replaced.append((number, original))
                    set_handler(number, partial(_keep_or_call, original))
                _open = self  # the last that a handler may prevent, and the first that keeps it
            except BaseException:
                self._restore()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def keep(self, number: int, handler: Handler, frame: FrameType | None) -> None:
        """Call ``handler`` later; or now, with all that were kept, if this is the SIGINT that is given way to."""
        again = number in self._kept
        self._kept[number] = (handler, frame)
        if again and number == signal.SIGINT and self._gives_way:
            self._close()  # before anything is raised: who is torn out of its way cannot

    def _close(self) -> None:
        """End the protection, and call what was kept.  Doing it again does nothing."""
        global _open
        if _open is not self:
            return
        try:
            try:
                _open = None
                self._restore()
            finally:  # after what a handler may have raised that ran before it was put back, or since
                if self._replaced:
                    self._restore()
        finally:
            if self._replaced:
                self._restore()
            if self._kept:
                self._hand_on()

    def _hand_on(self) -> None:
        """Call the handlers, each whatever the others raise, and let go of the frames (they would be in a circle)."""
        if self._kept:
            number, (handler, frame) = self._kept.popitem()
            try:
                handler(number, frame)
            finally:
                self._hand_on()

    def _restore(self) -> None:
        """Put all handlers back, whatever one that is back already may raise meanwhile."""
        try:
            while self._replaced:
                set_handler(*self._replaced[-1])
                self._replaced.pop()
        finally:
            if self._replaced:
                self._restore()


_open: Uninterrupted | None = None

__all__ = ["Uninterrupted"]
