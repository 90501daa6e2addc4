"""Names by which operators find rules: an operator's arguments are tensors, numbers and texts, and no rule."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable
from typing import Any

#: Every rule that is alive, by name.
_rules: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_count = itertools.count(1)
#: Part of the names that only this process knows, so that no other process finds another rule by one of them.
_here = secrets.token_hex(4)


def register(rule: Any, function: Callable[..., Any], composed: bool) -> str:
    """Return a name for ``rule``, by which :func:`find` returns it while it is alive.

    A rule of a module has the name of its function, by which any process finds it that can import it.  A rule that was
    made in a function or of others, and a second rule of one function, have a name for this process alone.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "rule")
    full = f"{module}:{name}"
    if composed or module is None or "<locals>" in name or full in _rules:
        full = f"{name}@{_here}.{next(_count)}"
    _rules[full] = rule
    return full


def find(name: str) -> Any:
    """Return the rule that is alive and has this name; None if there is none."""
    return _rules.get(name)


__all__ = ["find", "register"]
