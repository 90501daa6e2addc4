"""A command as a process: what ends it from outside is one line and an exit status, never a traceback.

Ctrl-C, whenever it comes, a package that is missing, and an output that takes no more.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

INTERRUPTED = 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Packages without which there are no numbers.
NEEDED = ("torch", "numpy", "numba", "rich")
#: What is said where one of them is not there.
MISSING = (
    "{package} cannot be imported ({error}); `make setup` installs it, or `pip install {package}`; notes/setup.md says "
    "with which options"
)
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

    warnings.formatwarning = lambda message, *_: f"{name}: {message}\n"  # the line of ours that warned tells nothing
    handle(leave)
    try:
        try:
            loaded = load()
            handle(signal.default_int_handler)
            status = run(loaded)
        finally:
            _flush()  # here, where an error can still be told: --help, which leaves with SystemExit, prints too
    except KeyboardInterrupt:
        status = interrupted(name)
    except ImportError as error:
        if (problem := missing(error)) is None:
            raise
        print(f"{name}: {problem}", file=sys.stderr)
        status = 1
    except OSError as error:
        if (found := unwritten(name, error)) is None:
            raise
        status = found
    handle(signal.SIG_IGN)
    return status


def end(status: int) -> NoReturn:
    """End a program that was started with ``python -m``, with an exit status.

    Where a KeyboardInterrupt has passed through ``exec()``, as in the middle of making a dataclass, such a Python ends
    by the signal, though somebody has handled it; so an interrupted one does not come to Python's own end.
    """
    if status == INTERRUPTED:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            _flush()
        os._exit(status)
    sys.exit(status)


def interrupted(name: str) -> int:
    """Say it, and return the exit status."""
    print(f"{name}: interrupted", file=sys.stderr)
    return INTERRUPTED


def missing(error: ImportError) -> str | None:
    """Which package of those needed cannot be imported, and what to do; None: it is another error."""
    package = (error.name or "").partition(".")[0]
    return MISSING.format(package=package, error=error) if package in NEEDED else None


def unwritten(name: str, error: OSError) -> int | None:
    """The exit status, if it is an output that takes no more, else None.

    That its reader has gone, as ``head`` does, is nothing to be said (1, as of a table); that the disk is full is (2).
    """
    if error.errno not in (errno.EPIPE, *NO_ROOM) or error.filename is not None:
        return None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # so that the end of the process does not try once more
    os.close(nowhere)
    if error.errno == errno.EPIPE:
        return 1
    print(f"{name}: the output cannot be written ({error.strerror}); make room, or send it elsewhere", file=sys.stderr)
    return 2


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def this_python() -> str:
    """The interpreter that runs, as a shell takes it: what is below the current folder without the way there."""
    path = Path(sys.executable)
    if path.is_relative_to(here := Path.cwd()) and path.parent != here:
        path = path.relative_to(here)
    return shlex.quote(str(path))


__all__ = ["INTERRUPTED", "MISSING", "end", "interrupted", "missing", "process", "this_python", "unwritten"]
