"""What generated Numba code calls to call a C function."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def call_with(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call the C function at an address with one pointer; its result, a pointer too."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        pointed = builder.inttoptr(arguments[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(pointed, [arguments[1]])

    return types.int64(types.int64, types.int64), generate
