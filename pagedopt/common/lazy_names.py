"""Names of a package that are imported on first use, so that importing the package is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .similar_names import near


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
