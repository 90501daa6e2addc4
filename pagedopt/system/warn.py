"""What users are told: a log, warnings once in a process, variables without meaning, the error of lost state."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Hashable

log = logging.getLogger("pagedopt")
log.addHandler(logging.NullHandler())


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


def asks_for(variable: str, word: str, usual: str) -> bool:
    """Return whether a variable of the environment is ``word``; warn once if it has no meaning.

    Args:
        variable: its name.
        word: what it is if the user wants the other way.
        usual: what it may be as well, which is what happens without it.
    """
    found = os.environ.get(variable, "")
    if found not in ("", word, usual):
        text = f"{variable}={found!r} has no meaning and is ignored: use {word!r}, or {usual!r}, as without it"
        warn_once((variable, found), text)
    return found == word


class StateLost(RuntimeError):
    """State could neither be moved nor brought back to where it was."""


def lost_in_move(nbytes: int, reason: object) -> StateLost:
    """Return the error for ``nbytes`` of state that a move has lost."""
    return StateLost(
        f"{nbytes:,} bytes of optimizer state were neither moved nor left where they were ({reason}); load a checkpoint"
    )
