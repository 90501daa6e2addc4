"""Functions from generated text: compiled by Numba once, kept on disk, and loaded by the next process."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load(text: str, name: str, beside: str) -> Any:
    """The ``kernel`` of generated ``text``, compiled for what it is first called with or found from an earlier run.

    The text is not read from a file, which could hold something else.

    Args:
        text: a Python module that defines ``kernel`` with ``numba.njit``.
        name: part of the module's name, for errors.
        beside: the module whose functions it calls.
    """
    key = hashlib.sha256((text + sys.version + _text_of(beside)).encode()).hexdigest()[:16]
    module = ModuleType(f"pagedopt_{name[:64]}_{key}")
    file = f"<{module.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for errors of Numba
    sys.modules[module.__name__] = module  # Numba finds the kernel's globals there
    exec(compile(text, file, "exec"), module.__dict__)
    return keep(module, "kernel")


def keep(module: ModuleType, name: str) -> Any:
    """A function of a generated module, whose code is kept on disk."""
    from .code_cache import KeptCode

    function = module.__dict__[name]
    function._cache = KeptCode(f"{module.__name__}-{name}")
    return function


@functools.cache
def _text_of(module: str) -> str:
    """What is kept does not show a change in a module that the generated one calls into; the key does."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"generated code calls into {module}, which is not there")
    return Path(spec.origin).read_text()
