"""Signals at a line of the package, and failures of what it calls: one shot, then the verdict is the test's.

A signal is a real one, raised where the N-th line of the package's own files begins, in the thread that runs them; what
its handler raises rises there.  A failure is an exception in the place of what a call returns that can fail, as it asks
for memory, the system or a driver: the call has been made.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pagedopt

PACKAGE = str(Path(pagedopt.__file__).parent) + "/"
#: Files of the package whose functions stand for one call to the system or the driver each.
WRAPPERS = (PACKAGE + "system/libc.py", PACKAGE + "system/driver.py")
#: Modules whose functions ask the system.
SYSTEM = {"posix", "os", "mmap", "fcntl", "shutil", "io", "_io", "ctypes", "_ctypes"}
#: Functions of torch and NumPy that need memory.  What else these do is not made to fail, but for what is on a GPU.
ALLOCATING = {
    "arange", "array", "ascontiguousarray", "astype", "cat", "clone", "concatenate", "copy", "copy_", "cumsum", "diff",
    "empty", "empty_like", "flatnonzero", "full", "isin", "nonzero", "ones", "repeat", "searchsorted", "setdiff1d",
    "stack", "to", "unique", "where", "zeros", "zeros_like",
}  # fmt: skip
#: Functions of the system that only tell.
TELLING = {"getpid", "fspath"}
#: These fail before they are made: what they return would be nobody's.
OPENING = {"open", "dup", "pipe", "memfd_create"}


class Alarm(Exception):
    """What the handler of SIGALRM raises."""


@dataclass
class Outcome:
    """What came of a call with an injection.

    Attributes:
        lines: file:line, in the package, of each line, or call that returned, that was counted until the function
            ended or the last shot.
        shots: where each shot hit, as file:line or file:line name.
        value, error: what the function returned or raised.
        unraisable: what was raised where nothing can rise (a finalizer) and Python dropped it.
    """

    lines: list[str] = field(default_factory=list)
    shots: list[str] = field(default_factory=list)
    value: Any = None
    error: BaseException | None = None
    unraisable: list[BaseException | None] = field(default_factory=list)
    in_finalizer: bool = False  # a shot hit there: what is raised may be dropped without a word

    @property
    def events(self) -> int:
        return len(self.lines)

    @property
    def last_times(self) -> list[int]:
        """The number of the last event at each line."""
        return sorted({line: at for at, line in enumerate(self.lines, 1)}.values())

    @property
    def files(self) -> list[str]:
        return [line.rpartition(":")[0] for line in self.lines]


def interrupt_at(
    at: int | Sequence[int],
    number: int,
    function: Callable[[], Any],
    of: Sequence[Callable[..., Any]] = (),
    handler: Callable[..., Any] | None = None,
) -> Outcome:
    """Call ``function`` and raise signal ``number`` where the ``at``-th line begins (several: one after the other).

    The handlers are Python's own for SIGINT, and for any other signal one that raises :class:`Alarm`; afterwards they
    must be in their places.

    Args:
        of: functions whose lines count; none: all lines of the package do.
        handler: what handles the signal in their place.
    """
    out = Outcome()
    lines = [at] if isinstance(at, int) else list(at)
    codes = [each.__code__ for each in of]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in codes if codes else not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            out.lines.append(_place(frame))
            if out.events in lines:
                out.shots.append(_place(frame))
                out.in_finalizer |= _in_finalizer(frame)
                signal.raise_signal(number)  # its handler runs in here, where nothing is traced
        return trace

    with _handlers(number, handler), _unraisable(out), _restoring(sys.gettrace, sys.settrace):
        sys.settrace(trace)
        _call(function, out, lambda: sys.settrace(None))
    return out


def fail_at(at: int, error: BaseException, function: Callable[[], Any]) -> Outcome:
    """Call ``function`` and raise ``error`` where the ``at``-th call returns that the package made to another.

    Calls of its threads count, too, if they begin meanwhile.
    """
    out = Outcome()
    lock = threading.Lock()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if out.shots or not _is_fallible(frame, event, argument):
            return
        with lock:
            out.lines.append(_place(frame))
            hit = out.events == at
        if hit:
            out.shots.append(f"{_place(frame)} {getattr(argument, '__qualname__', '')}")
            raise error

    with (
        _unraisable(out),
        _restoring(sys.getprofile, sys.setprofile),
        _restoring(threading.getprofile, threading.setprofile),
    ):
        threading.setprofile(profile)
        sys.setprofile(profile)
        _call(function, out, lambda: sys.setprofile(None))
        out.shots.append("end")  # threads that live on do no more
    out.shots.pop()
    return out


def _is_fallible(frame: FrameType, event: str, argument: Any) -> bool:
    name = frame.f_code.co_filename
    if event in ("c_call", "c_return"):
        moment = "c_call" if getattr(argument, "__name__", "") in OPENING else "c_return"
        called = str(getattr(argument, "__qualname__", ""))
        return event == moment and name.startswith(PACKAGE) and _can_fail(_module(argument), called)
    if event != "return":
        return False
    if name in WRAPPERS:
        return not frame.f_code.co_name.startswith(("_", "<"))
    caller = frame.f_back
    called_by_us = caller is not None and caller.f_code.co_filename.startswith(PACKAGE)
    return called_by_us and _can_fail(str(frame.f_globals.get("__name__")), frame.f_code.co_name)


def _can_fail(module: str, name: str) -> bool:
    """Whether a function asks for memory, the system or a driver."""
    first, last = module.partition(".")[0], name.rpartition(".")[-1]
    if first in ("torch", "numpy"):
        return last in ALLOCATING or module.startswith("torch.cuda") or "cuda" in name.lower()
    return first in SYSTEM and last not in TELLING


def _module(function: Any) -> str:
    """The first part of the name of the module that a built-in function, or the object it is bound to, comes from."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__module__", None)
    if name is None and owner is not None:
        name = (owner if isinstance(owner, type) else type(owner)).__module__
    return str(name).partition(".")[0]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE)


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == weakref.__file__ and frame.f_code.co_name == "__call__":
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType) -> str:
    return f"{_file(frame)}:{frame.f_lineno}"


def _call(function: Callable[[], Any], out: Outcome, stop: Callable[[], None]) -> None:
    try:
        out.value = function()
    except BaseException as error:
        stop()
        out.error = error.with_traceback(None)  # its frames would keep alive what the test lets go
        for hidden in (error.__context__, error.__cause__):
            if hidden is not None:
                hidden.__traceback__ = None
    finally:
        stop()


@contextlib.contextmanager
def _handlers(number: int, handler: Callable[..., Any] | None) -> Iterator[None]:
    def alarm(*_: Any) -> None:
        raise Alarm

    ours = handler or (signal.default_int_handler if number == signal.SIGINT else alarm)
    before = signal.signal(number, ours)
    try:
        yield
        assert signal.getsignal(number) is ours, "another handler stands in the place of the user's"
    finally:
        signal.signal(number, before)


def _unraisable(out: Outcome) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(sys, "unraisablehook", lambda what: out.unraisable.append(what.exc_value))


@contextlib.contextmanager
def _restoring(get: Callable[[], Any], put: Callable[[Any], None]) -> Iterator[None]:
    before = get()
    try:
        yield
    finally:
        put(before)
