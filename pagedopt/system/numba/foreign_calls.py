"""Calls of C functions by their addresses, for compiled Numba code.  Pointers are int64."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


@intrinsic
def call_with_word_at(typing_context: Any, function: Any, address: Any) -> Any:
    """Call a function that takes one pointer and returns one with the pointer that lies at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(_WORD, [_WORD]).as_pointer())
        return builder.call(function, [builder.load(builder.inttoptr(arguments[1], _WORD.as_pointer()))])

    return types.int64(types.int64, types.int64), generate
