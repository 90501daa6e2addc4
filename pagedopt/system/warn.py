"""Warnings that are said once in a process, however often their cause comes back."""

from __future__ import annotations

import warnings
from collections.abc import Hashable

from .log import log

_said: set[Hashable] = set()


def warn_once(key: Hashable, text: str, stacklevel: int = 2) -> None:
    """Warn (RuntimeWarning) unless there was a warning of the same key.

    Args:
        key: what the warning is about; a tuple that begins with the name of the matter.
        stacklevel: as :func:`warnings.warn` counts it, from the caller: 1 is the line that calls this.
    """
    if key not in _said:
        _said.add(key)
        log.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
