"""What generated Numba code calls to call C functions by their addresses; pointers are whole numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD, _INT = ir.IntType(64), ir.IntType(32)


@intrinsic
def call_with(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a function with one pointer; its result, a pointer too."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, _WORD, *arguments)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call_with_two(typing_context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call a function with two pointers; its result, a pointer too."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, _WORD, *arguments)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def ask_with_four(typing_context: Any, function: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Call a function with four pointers; its result, an ``int``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, _INT, *arguments)

    return types.int32(types.int64, types.int64, types.int64, types.int64, types.int64), generate


def _call(builder: Any, result: Any, function: Any, *arguments: Any) -> Any:
    pointed = builder.inttoptr(function, ir.FunctionType(result, [_WORD] * len(arguments)).as_pointer())
    return builder.call(pointed, arguments)
