"""Calls of C functions by their addresses, for generated Numba code.  Pointers are int64."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def call_with(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a function that takes one pointer and returns one."""
    return _call(types.int64, 1)


@intrinsic
def call_with_two(typing_context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call a function that takes two pointers and returns one."""
    return _call(types.int64, 2)


@intrinsic
def ask_with_four(typing_context: Any, function: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Call a function that takes four pointers and returns an ``int``."""
    return _call(types.int32, 4)


def _call(result: Any, count: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(result.bitwidth), [ir.IntType(64)] * count)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return result(*[types.int64] * (count + 1)), generate
