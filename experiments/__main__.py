"""List the experiments, or run one by name."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import experiments


def modules() -> list[str]:
    """Names of the modules here, experiments and what they share."""
    return [module.name for module in pkgutil.iter_modules(experiments.__path__) if not module.name.startswith("__")]


def found() -> dict[str, str]:
    """Name and first docstring line of every experiment: each module with a ``main``."""
    imported = {name: importlib.import_module(f"experiments.{name}") for name in modules()}
    return {name: (m.__doc__ or "").strip().splitlines()[0] for name, m in imported.items() if hasattr(m, "main")}


def main(arguments: Sequence[str]) -> int:
    """``python -m experiments [NAME [OPTIONS]]``"""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m experiments NAME [--help]\n")
        for name, line in found().items():
            print(f"  {name:20} {line}")
        return 0
    name, *rest = arguments
    run = getattr(importlib.import_module(f"experiments.{name}"), "main", None) if name in modules() else None
    if run is None:
        print(f"there is no experiment {name!r}; there are {', '.join(found())}", file=sys.stderr)
        return 2
    return int(run(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
