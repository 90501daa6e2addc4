"""Names of a package that are imported on first use, so that importing the package is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .similar_names import near


class Missing:
    """A name that users may look for and that is not there: whatever is done with it raises AttributeError."""

    def __init__(self, text: str, name: str) -> None:
        self._error = AttributeError(text, name=name)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error.with_traceback(None)

    __call__ = __getattr__ = __mro_entries__ = _refuse

    def __repr__(self) -> str:
        return f"<{self._error}>"


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
        instead: what to write for a name that is missing but that users may look for; it can be imported, and says so
            when it is called.
        unlisted: names to import, by module, that neither ``__all__`` nor ``dir`` has.

    Example:
        >>> __getattr__, __dir__, __all__ = attach(__name__, {".base": ("PagedOptimizer",)})
    """
    listed = {name: module for module, names in modules.items() for name in names}
    homes = listed | {name: module for module, names in (unlisted or {}).items() for name in names}

    def find(name: str) -> Any:
        if instead and name in instead:  # an AttributeError would reach `from … import` without its text
            return Missing(f"module {package!r} has no attribute {name!r}: {instead[name]}", name)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{near(name, homes, 'Paged')}", name=name)
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(listed), list(listed)
