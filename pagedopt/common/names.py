"""Names that a package imports on first use, so that importing it is fast; similar names; names of classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str,
    modules: Mapping[str, Iterable[str]],
    instead: Mapping[str, str] | None = None,
    unlisted: Mapping[str, Iterable[str]] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package.

    Args:
        package: its ``__name__``.
        modules: the names to import by module (relative to the package).
        instead: what to write for a name that is missing but that users may look for; errors say it.
        unlisted: names to import, by module, that neither ``__all__`` nor ``dir`` has.

    Example:
        >>> __getattr__, __dir__, __all__ = attach(__name__, {".base": ("PagedOptimizer",)})
    """
    listed = {name: module for module, names in modules.items() for name in names}
    homes = listed | {name: module for module, names in (unlisted or {}).items() for name in names}

    def find(name: str) -> Any:
        if instead and name in instead:
            # `from … import` asks through importlib, drops the text of an AttributeError, and passes an ImportError on.
            imported = sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
            text = f"module {package!r} has no attribute {name!r}: {instead[name]}"
            raise (ImportError if imported else AttributeError)(text, name=name)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{near(name, homes, 'Paged')}", name=name)
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(listed), list(listed)


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
    """Return the known name most like this one, best one that differs in case; "" if none is ``like`` (1: equal)."""
    from difflib import get_close_matches

    names = [*known]
    but_for_case = [each for each in names if each.lower() == name.lower()]
    return "".join(but_for_case[:1] or get_close_matches(name, names, 1, like))


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article.

    >>> kind_of(3), kind_of([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"an {name}" if name.lower().startswith(("a", "e", "i", "o")) else f"a {name}"
