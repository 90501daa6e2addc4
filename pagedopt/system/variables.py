"""Variables of the environment that choose between two ways."""

from __future__ import annotations

import os

from .warn import warn_once


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
