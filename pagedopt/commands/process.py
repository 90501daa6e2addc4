"""A command as a process. Ctrl-C, a missing package and a full disk end it with one line, never with a traceback."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

INTERRUPTED = 130
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Packages that every command needs.
NEEDED = ("torch", "numpy", "numba", "rich")
#: The message if one of them cannot be imported.
MISSING = (
    "{package} cannot be imported ({error}); `make setup` installs it, or `pip install {package}`; notes/setup.md says "
    "with which options"
)
Loaded = TypeVar("Loaded")


def process(name: str, load: Callable[[], Loaded], run: Callable[[Loaded], int]) -> int:
    """Do ``run(load())`` and return the exit status.

    Args:
        name: of the program, with which each message begins.
        load: parses arguments and imports modules. Ctrl-C ends the process at once: there is nothing to clean up yet,
            and an interrupted import raises arbitrary errors.
        run: does the work. Here Ctrl-C raises KeyboardInterrupt; once it has returned, Ctrl-C is ignored.
    """
    # A shell may have started us with SIGINT ignored. Then it stays ignored.
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def exit_at_once(*_: object) -> None:
        os.write(sys.stderr.fileno(), f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    def handle(handler: object) -> None:
        if handled:
            signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]

    warnings.formatwarning = lambda message, *_: f"{name}: {message}\n"  # users need no line of our source
    handle(exit_at_once)
    try:
        try:
            loaded = load()
            handle(signal.default_int_handler)
            status = run(loaded)
        finally:
            _flush()  # here a failure can still be reported; --help, which ends with SystemExit, prints too
    except KeyboardInterrupt:
        status = interrupted(name)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED:
            raise
        print(f"{name}: {MISSING.format(package=package, error=error)}", file=sys.stderr)
        status = 1
    except OSError as error:
        if error.errno not in (errno.EPIPE, *NO_SPACE) or error.filename is not None:
            raise
        status = _unwritten(name, error)
    handle(signal.SIG_IGN)
    return status


def end(status: int) -> NoReturn:
    """End a program that was started with ``python -m``.

    If a KeyboardInterrupt has passed through ``exec()`` (dataclasses use it), CPython ends by SIGINT even after the
    exception was handled. An interrupted program therefore skips CPython's own shutdown.
    """
    if status == INTERRUPTED:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            _flush()
        os._exit(status)
    sys.exit(status)


def interrupted(name: str) -> int:
    """Report an interrupt and return its exit status."""
    print(f"{name}: interrupted", file=sys.stderr)
    return INTERRUPTED


def _unwritten(name: str, error: OSError) -> int:
    """Return the exit status after a failed write: 1 if the reader is gone (``| head``), 2 if the disk is full."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # else Python's shutdown would try to write again
    os.close(nowhere)
    if error.errno == errno.EPIPE:
        return 1
    print(f"{name}: the output cannot be written ({error.strerror}); make room, or send it elsewhere", file=sys.stderr)
    return 2


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()
