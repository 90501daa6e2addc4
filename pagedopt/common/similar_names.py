"""The known name that a misspelt one may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def near(name: str, known: Iterable[str], begin: str = "") -> str:
    """Return the end of a message, "; did you mean X?", with the known name most like this one; "" if none is.

    Of names that begin with ``begin`` only what follows is compared, and only with each other.
    """
    if begin and name.startswith(begin):
        known = [each.removeprefix(begin) for each in known if each.startswith(begin)]
        name = name.removeprefix(begin)
    else:
        begin = ""
    found = nearest(name, known)
    return f"; did you mean {begin}{found}?" if found else ""


def nearest(name: str, known: Iterable[str], like: float = 0.7) -> str:
    """Return the known name most like this one, "" if none has a likeness of ``like`` (1: equal)."""
    from difflib import get_close_matches

    return "".join(get_close_matches(name, list(known), 1, like))
