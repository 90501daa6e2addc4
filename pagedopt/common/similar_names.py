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


def one_edit_apart(one: str, other: str) -> bool:
    """Return whether one letter, inserted, left out, replaced or swapped with the next, makes one name the other."""
    if one == other:
        return False
    same = 0
    while one[same : same + 1] == other[same : same + 1]:
        same += 1
    here, there = one[same:], other[same:]
    return here[1:] == there or here == there[1:] or here[1:] == there[1:] or here[1::-1] + here[2:] == there


def nearest(name: str, known: Iterable[str], like: float = 0.7) -> str:
    """Return the known name most like this one, "" if none has a likeness of ``like`` (1: equal)."""
    from difflib import get_close_matches

    return "".join(get_close_matches(name, list(known), 1, like))
