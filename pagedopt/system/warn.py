"""Warnings that name the user's line, and are said once in a process where their cause comes back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

from .log import log

#: Whose lines tell nobody what to change.
INSIDE = (__name__.partition(".")[0], "numba", "torch")
_said: set[Hashable] = set()


def warn_once(key: Hashable, text: str) -> None:
    """Warn (RuntimeWarning) unless there was a warning of the same key.

    Args:
        key: what the warning is about; a tuple that begins with the name of the matter.
    """
    if key not in _said:
        _said.add(key)
        log.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=outside())


def outside() -> int:
    """The ``stacklevel`` with which the caller's warning names the first line that is neither ours nor Numba's nor
    torch's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    return level
