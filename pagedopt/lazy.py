"""Names of a package that are loaded when first used, so that importing it costs little."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: its ``__name__``.
        modules: by their names, relative to the package, the names to take from them.

    Example:
        >>> __getattr__, __dir__, __all__ = attach(__name__, {".base": ("PagedOptimizer",)})
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes), list(homes)
