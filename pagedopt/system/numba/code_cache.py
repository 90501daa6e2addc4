"""Numba's compiled code in our own cache.

Numba's cache believes the pickles that it finds, raises on damaged ones, and may lie in a folder of Numba's own choice.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from .. import cache


class KeptCode(NullCache):
    """Where a dispatcher looks before it compiles, and leaves what it compiled: one file per signature and processor.

    Args:
        name: says all that the code depends on, but for signature and processor.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """The compiled code for a signature, or None."""
        target_context.refresh()
        kept = cache.find(self._file(sig, target_context.codegen()))
        data = None if kept is None else cache.unseal(kept)
        if kept is None or data is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(data))
        except Exception as error:
            cache.discard(kept.path, f"{type(error).__name__}: {error}")
            return None

    def save_overload(self, sig: Any, cres: CompileResult) -> None:
        """Keep compiled code, if it may be used in another process."""
        if not cres.library.has_dynamic_globals:  # type: ignore[attr-defined]  # Numba sets it by name
            name = self._file(sig, cres.codegen)
            cache.keep(name, cache.seal(name, dumps(cres._reduce())))

    def _file(self, sig: Any, codegen: Any) -> str:
        key = hashlib.sha256(repr((str(sig), codegen.magic_tuple(), numba.__version__)).encode())
        return f"{self.name}-{key.hexdigest()[:16]}.numba"
