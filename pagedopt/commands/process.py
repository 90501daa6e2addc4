"""A command as a process: Ctrl-C, whenever it comes, is one line and exit status 130."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

INTERRUPTED = 130
Loaded = TypeVar("Loaded")


def process(name: str, load: Callable[[], Loaded], run: Callable[[Loaded], int]) -> int:
    """Do ``run(load())`` and return the exit status.

    Args:
        name: of the program.
        load: parses and imports.  There is nothing to put away yet, and modules that are torn in the middle of being
            imported say anything: Ctrl-C ends the process at once.
        run: the rest, in which Ctrl-C is a KeyboardInterrupt; what comes later finds nothing more to stop.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else ignored, as a shell may have asked

    def leave(*_: object) -> None:
        os.write(sys.stderr.fileno(), f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    def handle(handler: object) -> None:
        if heeded:
            signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]

    handle(leave)
    loaded = load()
    handle(signal.default_int_handler)
    try:
        status = run(loaded)
    except KeyboardInterrupt:
        status = interrupted(name)
    handle(signal.SIG_IGN)
    return status


def interrupted(name: str) -> int:
    """Say it, and return the exit status."""
    print(f"{name}: interrupted", file=sys.stderr)
    return INTERRUPTED


__all__ = ["INTERRUPTED", "interrupted", "process"]
