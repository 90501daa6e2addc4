"""Warnings that name the user's line and appear once per process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

from .log import log

#: Packages that :func:`outside` skips: the user cannot change their lines.
INSIDE = (__name__.partition(".")[0], "numba", "torch")
_said: set[Hashable] = set()


def warn_once(key: Hashable, text: str) -> None:
    """Warn (RuntimeWarning) unless this process has already warned with the same key."""
    if key not in _said:
        _said.add(key)
        log.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=outside())


def outside() -> int:
    """Return the ``stacklevel`` for a warning of the caller that names the first line outside of :data:`INSIDE`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    return level
