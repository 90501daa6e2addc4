"""A reading of memory that a thread takes again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def watched(read: Callable[[], int], pause: float = 0.001) -> Iterator[list[int]]:
    """What is read before the block, every ``pause`` seconds in it, and behind it."""
    found, stop = [read()], threading.Event()

    def watch() -> None:
        while not stop.wait(pause):
            found.append(read())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found.append(read())
