"""What may have been meant by a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable

#: From which likeness on a name is offered; 1 is the same.
LIKE = 0.7


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message, with the name of those known that is most like this one; "" if none is."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def nearest(name: str, known: Iterable[str], like: float = LIKE) -> str:
    """The name of those known that is most like this one, and ``like`` it at least; "" if none is."""
    from difflib import get_close_matches

    return "".join(get_close_matches(name, list(known), 1, like))


__all__ = ["near", "nearest"]
