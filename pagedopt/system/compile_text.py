"""Functions that Numba compiles from generated text; later processes load them from disk."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .warn import warn_once


def turn_jit_on() -> None:
    """Undo ``NUMBA_DISABLE_JIT=1``, with a warning: kernels work on addresses, which no Python code can read."""
    import numba

    config: Any = numba.config
    if config.DISABLE_JIT:
        config.DISABLE_JIT = 0
        warn_once(
            "NUMBA_DISABLE_JIT",
            "NUMBA_DISABLE_JIT is set, without effect from here on: Numba has to compile kernels of parameters on a "
            "CPU; functions of your own that are decorated later are compiled, too",
        )


def load(text: str, name: str, beside: str) -> Any:
    """Return the function ``kernel`` of generated ``text``; its first call compiles it or loads it from the cache.

    The text is passed in memory: a file on disk could hold something else.

    Args:
        text: a Python module that defines ``kernel`` with ``numba.njit``.
        name: part of the module's name, for errors.
        beside: the module whose functions the text calls.
    """
    from .numba_parts import CodeCache

    module = _module(text, name, beside)
    module.kernel._cache = CodeCache(module.__name__)
    return module.kernel


@functools.cache
def shared(text: str, name: str, beside: str) -> str:
    """Return the name of the module of a generated text, for kernels to import from: Numba compiles its functions once.

    Args:
        text, name, beside: as of :func:`load`; the text defines any functions with ``numba.njit``.
    """
    return _module(text, name, beside).__name__


def _module(text: str, name: str, beside: str) -> ModuleType:
    turn_jit_on()
    key = hashlib.sha256((text + sys.version + _text_of(beside)).encode()).hexdigest()[:16]
    module = ModuleType(f"pagedopt_{name[:64]}_{key}")
    file = f"<{module.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for errors of Numba
    sys.modules[module.__name__] = module  # Numba finds the functions' globals there
    exec(compile(text, file, "exec"), module.__dict__)
    return module


@functools.cache
def _text_of(module: str) -> str:
    """Return the source of a module.  It is part of the key, as compiled code holds what the generated text calls."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"generated code calls into {module}, which is not there")
    return Path(spec.origin).read_text()
