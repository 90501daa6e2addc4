"""What needs Numba to be loaded: our cache of its compiled code, and calls of C functions by their addresses."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import intrinsic

from . import cache


class CodeCache(NullCache):
    """The cache of a Numba dispatcher: one file per signature and processor.

    Args:
        name: identifies everything else that the code depends on.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """Return the compiled code for a signature, or None."""
        target_context.refresh()
        if (found := cache.find(self._file(sig, target_context.codegen()))) is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(found.data))
        except Exception as error:
            cache.discard(found.path, f"{type(error).__name__}: {error}")
            return None

    def save_overload(self, sig: Any, cres: CompileResult) -> None:
        """Cache compiled code, unless it holds addresses of this process."""
        if not cres.library.has_dynamic_globals:  # type: ignore[attr-defined]  # Numba sets it by name
            cache.store(self._file(sig, cres.codegen), dumps(cres._reduce()))

    def _file(self, sig: Any, codegen: Any) -> str:
        key = hashlib.sha256(repr((str(sig), codegen.magic_tuple(), numba.__version__)).encode())
        return f"{self.name}-{key.hexdigest()[:16]}.numba"


_WORD = ir.IntType(64)


@intrinsic
def call_with_word_at(typing_context: Any, function: Any, address: Any) -> Any:
    """Call a function that takes one pointer and returns one with the pointer that lies at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(_WORD, [_WORD]).as_pointer())
        return builder.call(function, [builder.load(builder.inttoptr(arguments[1], _WORD.as_pointer()))])

    return types.int64(types.int64, types.int64), generate
