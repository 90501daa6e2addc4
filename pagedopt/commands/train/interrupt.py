"""Ctrl-C and SIGTERM as a request to stop after the current step, unless that takes too long."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from ..process import INTERRUPTED

CAUGHT = (signal.SIGINT, signal.SIGTERM)
#: Seconds that a step may go on after SIGTERM, whose senders often kill after 30, and after a second signal.
PATIENCE, SECOND = 20.0, 2.0


class Interrupt:
    """While entered, a first signal sets ``requested``, and a second one ends the program as usual.

    Python handles signals between two calls of torch, and one call may take minutes.  So a thread ends the program
    (:func:`end_now`) if a step goes on for ``PATIENCE`` seconds after SIGTERM, or ``SECOND`` after a second signal.

    A signal that is ignored stays ignored: so shells protect background jobs from Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}
        self._between_steps = threading.Event()
        self._between_steps.set()

    def __enter__(self) -> Interrupt:
        self._undo = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            left = (signal.SIG_IGN, None)  # None: a handler that Python has not set and could not restore
            caught = [number for number in CAUGHT if signal.getsignal(number) not in left]
            self._previous = {number: signal.signal(number, self._handle) for number in caught}
            self._undo.enter_context(self._seen_by_a_thread())
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._undo.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A ``with`` block around a step, which may be ended if it takes too long."""
        self._between_steps.clear()
        try:
            yield
        finally:
            self._between_steps.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextlib.contextmanager
    def _seen_by_a_thread(self) -> Iterator[None]:
        """A ``with`` block in which a thread learns of every signal when it arrives, whatever the main thread does."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._end_late_steps, args=(receiver,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            sender.close()
            thread.join()
            receiver.close()

    def _end_late_steps(self, receiver: socket.socket) -> None:
        """End the program when a step has gone on for too long after a signal; return when the sender is closed."""
        deadline, signals = math.inf, 0
        while True:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            if wait([receiver], left):  # select() refuses descriptors above 1,023
                if not (number := receiver.recv(1)):
                    return
                if number[0] in CAUGHT:
                    signals += 1
                    patience = SECOND if signals > 1 else PATIENCE if number[0] == signal.SIGTERM else math.inf
                    deadline = min(deadline, time.monotonic() + patience)
            elif self._between_steps.is_set():
                deadline = math.inf
            else:
                end_now()
                return


def end_now() -> None:
    """End the process in the middle of a step, with the exit status of an interrupt."""
    print("\npagedopt train: ended within a step that took too long; checkpoints are whole", file=sys.stderr)
    sys.stderr.flush()
    os._exit(INTERRUPTED)
