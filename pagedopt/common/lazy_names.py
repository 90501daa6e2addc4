"""Names of a package that are loaded when first used, so that importing it costs little."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .similar_names import near


def attach(
    package: str, modules: Mapping[str, Iterable[str]], instead: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: its ``__name__``.
        modules: by their names, relative to the package, the names to take from them.
        instead: by names that are not there and that somebody may look for, what to write.

    Example:
        >>> __getattr__, __dir__, __all__ = attach(__name__, {".base": ("PagedOptimizer",)})
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            hint = f": {instead[name]}" if instead and name in instead else near(name, homes)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name)
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes), list(homes)
