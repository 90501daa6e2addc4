"""A lock that another thread of this process holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_by_another(lock: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """A block in which a thread of its own holds ``lock``; a child that is forked there has no such thread."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
