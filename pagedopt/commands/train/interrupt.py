"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, a first signal sets ``requested``, and a second one ends the program as usual.

    A signal that is ignored stays ignored: so shells protect background jobs from Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            left = (signal.SIG_IGN, None)  # None: a handler that Python has not set and could not restore
            caught = [number for number in CAUGHT if signal.getsignal(number) not in left]
            self._previous = {number: signal.signal(number, self._handle) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
