"""Warnings that are said once in a process, however often their cause comes back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

from .log import log

#: Whose lines tell nobody what to change.
INSIDE = (__name__.partition(".")[0], "numba", "torch")
_said: set[Hashable] = set()


def warn_once(key: Hashable, text: str, stacklevel: int | None = None) -> None:
    """Warn (RuntimeWarning) unless there was a warning of the same key.

    Args:
        key: what the warning is about; a tuple that begins with the name of the matter.
        stacklevel: as :func:`warnings.warn` counts it, from the caller: 1 is the line that calls this.  None: the first
            line that is neither ours nor Numba's nor torch's.
    """
    if key not in _said:
        _said.add(key)
        log.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=(_outside() if stacklevel is None else stacklevel) + 1)


def _outside() -> int:
    """How many frames there are from the caller of :func:`warn_once` to the first of somebody else."""
    frame, level = sys._getframe(2), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    return level
