"""The functions a rule may call, as Python knows them.  A name alone says nothing: what it is bound to does."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any


def sign(x: float) -> float:
    """-1, 0 or 1."""
    return float((x > 0) - (x < 0))


def fma(a: float, b: float, c: float) -> float:
    """a * b + c; the GPU rounds once."""
    return a * b + c


sqrt = math.sqrt

#: What each name must stand for, and where it comes from.
KNOWN: dict[str, tuple[Callable[..., Any], str]] = {
    "sqrt": (math.sqrt, "math"),
    "exp": (math.exp, "math"),
    "log": (math.log, "math"),
    "abs": (builtins.abs, "builtins"),
    "min": (builtins.min, "builtins"),
    "max": (builtins.max, "builtins"),
    "sign": (sign, "pagedopt.rules"),
    "fma": (fma, "pagedopt.rules"),
}

_UNBOUND = object()


class Binding:
    """A name that a function calls, and where Python looks it up: the function's closure, its globals, the builtins."""

    def __init__(self, function: Any, name: str) -> None:
        self.name = name
        self.known, self._home = KNOWN[name]
        free = function.__code__.co_freevars
        self._cell = function.__closure__[free.index(name)] if name in free else None
        self._globals, self._builtins = function.__globals__, function.__builtins__

    def holds(self) -> bool:
        """Whether the name stands for the known function now."""
        if self._cell is None:  # written out: this is asked in every step
            name = self.name
            return (self._globals[name] if name in self._globals else self._builtins.get(name)) is self.known
        return self._value() is self.known

    def complaint(self) -> str:
        """What is wrong with it, and what to write."""
        value = self._value()
        found = "is not defined" if value is _UNBOUND else f"is {value!r}, of which no kernel can be made"
        if self._home == "builtins":
            return f"{self.name!r} {found}; leave the name to Python's own {self.name}"
        return f"{self.name!r} {found}; write 'from {self._home} import {self.name}'"

    def _value(self) -> Any:
        if self._cell is None:
            return self._globals.get(self.name, self._builtins.get(self.name, _UNBOUND))
        try:
            return self._cell.cell_contents
        except ValueError:  # a variable that has no value yet
            return _UNBOUND


__all__ = ["KNOWN", "Binding", "fma", "sign", "sqrt"]
