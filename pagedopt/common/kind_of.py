"""What a value is, in a message."""

from __future__ import annotations


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article.

    >>> kind_of(3), kind_of([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"an {name}" if name.lower().startswith(("a", "e", "i", "o")) else f"a {name}"


__all__ = ["kind_of"]
