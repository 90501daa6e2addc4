"""Names in a rule: which are reserved, what a called name stands for, and whether that has changed."""

from __future__ import annotations

import re
from types import CodeType, FunctionType
from typing import Any

from .functions import FUNCTIONS

#: Keywords and macros of C++ that Python accepts as names.
_CPP_WORDS = frozenset(
    """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t compl const
    const_cast constexpr decltype default delete do double dynamic_cast enum explicit export extern false float
    friend goto inline int long mutable namespace new noexcept not_eq nullptr operator or_eq private protected
    public register reinterpret_cast short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true typedef typeid typename union unsigned using virtual void volatile wchar_t xor
    xor_eq INFINITY NAN NULL
    """.split()  # noqa: SIM905 - a table of words reads better than a list of strings
)
#: Names the generated CUDA or Python text needs for itself.
_OWN_WORDS = {"in", "u", "out", "S", "range", *FUNCTIONS}
_OWN_WORDS |= {name for function in FUNCTIONS.values() for name in (function.cuda, function.numba)}

UNBOUND = object()


def is_reserved(name: str) -> bool:
    """Whether a parameter or variable of a rule may not have this name."""
    return name in _CPP_WORDS | _OWN_WORDS or name.startswith("_") or re.fullmatch(r"u\d+", name) is not None


def value_of(function: FunctionType, name: str) -> Any:
    """Return what ``name`` stands for in ``function``: from its closure, globals or builtins, or UNBOUND."""
    free = function.__code__.co_freevars
    if name in free and function.__closure__ is not None:
        try:
            return function.__closure__[free.index(name)].cell_contents
        except ValueError:  # the variable has no value yet
            return UNBOUND
    return function.__globals__.get(name, builtins_of(function).get(name, UNBOUND))


def builtins_of(function: Any) -> dict[str, Any]:
    """Return the builtins of a function."""
    found: dict[str, Any] = function.__builtins__
    return found


def complaint(name: str, value: Any) -> str:
    """Say why ``name``, one of :data:`FUNCTIONS`, must not stand for ``value``, and what to write."""
    home = FUNCTIONS[name].home
    found = "is not defined" if value is UNBOUND else f"is {value!r}, of which no kernel can be made"
    if home == "builtins":
        return f"{name!r} {found}; leave the name to Python's own {name}"
    return f"{name!r} {found}; write 'from {home} import {name}'"


class Dependencies:
    """What a translation depends on: the code and defaults of functions, and what the names they call stand for."""

    def __init__(self) -> None:
        #: (globals, builtins, name, its value, the function that calls it, "file:line" of the call)
        self._names: list[tuple[dict[str, Any], dict[str, Any], str, Any, FunctionType, str]] = []
        #: (name, its value, the function that calls it, "file:line" of the call)
        self._closures: list[tuple[str, Any, FunctionType, str]] = []
        self._codes: list[tuple[FunctionType, CodeType]] = []
        #: (function, defaults by position, defaults by name)
        self._defaults: list[tuple[FunctionType, Any, Any]] = []

    def add_code(self, function: FunctionType) -> None:
        """Record the code of ``function``."""
        if all(known is not function for known, _ in self._codes):
            self._codes.append((function, function.__code__))

    def add_defaults(self, function: FunctionType) -> None:
        """Record the defaults of ``function``."""
        named = function.__kwdefaults__
        self._defaults.append((function, function.__defaults__, named and dict(named)))

    def add_name(self, function: FunctionType, name: str, where: str) -> None:
        """Record what ``name`` stands for in ``function``, which calls it at ``where``."""
        value = value_of(function, name)
        if name in function.__code__.co_freevars:
            self._closures.append((name, value, function, where))
        elif all(known[0] is not function.__globals__ or known[2] != name for known in self._names):
            self._names.append((function.__globals__, builtins_of(function), name, value, function, where))

    def unchanged(self) -> bool:
        """Whether nothing has changed.  Written as loops, because every step calls it."""
        for names, builtins, name, value, _, _ in self._names:
            if (names[name] if name in names else builtins.get(name)) is not value:
                return False
        for function, code in self._codes:
            if function.__code__ is not code:
                return False
        for function, defaults, named in self._defaults:
            if function.__defaults__ is not defaults or function.__kwdefaults__ != named:
                return False
        return not self._closures or all(value_of(f, name) is value for name, value, f, _ in self._closures)

    def first_change(self) -> str:
        """Describe the first change, with its "file:line"; there must be one."""
        for name, value, function, where in (*(known[2:] for known in self._names), *self._closures):
            now = value_of(function, name)
            if now is not value and name in FUNCTIONS:
                return f"{where}: {complaint(name, now)}"
            if now is not value:
                return f"{where}: {name!r} {'is not defined' if now is UNBOUND else f'is {now!r}'}; it was {value!r}"
        for function, code in self._codes:
            if function.__code__ is not code:
                return f"{_location(code)}: the code of {function.__name__!r} was replaced; make the rule anew"
        function, *_ = self._defaults[-1]
        return f"{_location(function.__code__)}: defaults of a function that it calls were replaced; make the rule anew"


def _location(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"
