"""What may have been meant by a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable

#: From which likeness on a name is offered; 1 is the same.
LIKE = 0.7


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message, with the name of those known that is most like this one; "" if none is."""
    from difflib import get_close_matches

    return "".join(f"; did you mean {found}?" for found in get_close_matches(name, known, 1, LIKE))


__all__ = ["near"]
