"""List the experiments, or run one by name."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import experiments


def found() -> dict[str, str]:
    """Name and first docstring line of every experiment: each module with a ``main``."""
    modules = (importlib.import_module(f"experiments.{m.name}") for m in pkgutil.iter_modules(experiments.__path__)
               if not m.name.startswith("__"))  # fmt: skip
    return {
        m.__name__.rpartition(".")[2]: (m.__doc__ or "").strip().splitlines()[0] for m in modules if hasattr(m, "main")
    }


def main(arguments: Sequence[str]) -> int:
    """``python -m experiments [NAME [OPTIONS]]``"""
    known = found()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m experiments NAME [--help]\n")
        for name, line in known.items():
            print(f"  {name:20} {line}")
        return 0
    name, *rest = arguments
    if name not in known:
        print(f"there is no experiment {name!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"experiments.{name}").main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
