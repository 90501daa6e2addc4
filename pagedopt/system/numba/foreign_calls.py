"""Calls of C functions by their addresses, and memory by its address, for compiled Numba code.  Pointers are int64."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


@intrinsic
def call_with(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a function that takes one pointer and returns one."""
    return _call(64, 1)


@intrinsic
def call_with_two(typing_context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call a function that takes two pointers and returns one."""
    return _call(64, 2)


@intrinsic
def call_with_three(typing_context: Any, function: Any, first: Any, second: Any, third: Any) -> Any:
    """Call a function that takes three pointers and returns one."""
    return _call(64, 3)


@intrinsic
def ask(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a function that takes one pointer and returns a ``bool``."""
    return _call(8, 1)


@intrinsic
def ask_for(typing_context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call a function that takes two pointers and returns an ``int``."""
    return _call(32, 2)


@intrinsic
def ask_with_four(typing_context: Any, function: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Call a function that takes four pointers and returns an ``int``."""
    return _call(32, 4)


@intrinsic
def run_team(typing_context: Any, function: Any, member: Any, argument: Any, threads: Any) -> Any:
    """Call ``GOMP_parallel(member, argument, threads, 0)``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_WORD, _WORD, number, number])
        function, member, argument, threads = arguments
        count = builder.trunc(threads, number)
        builder.call(builder.inttoptr(function, kind.as_pointer()), [member, argument, count, number(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def launch_kernel(
    typing_context: Any, function: Any, kernel: Any, blocks: Any, threads: Any, stream: Any, parameters: Any
) -> Any:
    """Call ``cuLaunchKernel`` with a grid and blocks of one dimension, and return its error."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(number, [_WORD, *[number] * 7, _WORD, _WORD, _WORD])
        function, kernel, blocks, threads, stream, parameters = arguments
        one, none = number(1), number(0)
        grid, block = (builder.trunc(blocks, number), one, one), (builder.trunc(threads, number), one, one)
        given = [kernel, *grid, *block, none, stream, parameters, _WORD(0)]
        return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), given), _WORD)

    return types.int64(*[types.int64] * 6), generate


@intrinsic
def let_go_of_the_gil(typing_context: Any, function: Any) -> Any:
    """Call ``PyEval_SaveThread()``, and return what ``PyEval_RestoreThread`` takes."""
    return _call(64, 0)


@intrinsic
def word_at(typing_context: Any, address: Any) -> Any:
    """Return the int64 at an address."""
    return _load(types.int64, _WORD)


@intrinsic
def put_word(typing_context: Any, address: Any, value: Any) -> Any:
    """Write an int64 at an address."""
    return _store(types.int64, _WORD)


@intrinsic
def double_at(typing_context: Any, address: Any) -> Any:
    """Return the float64 at an address."""
    return _load(types.float64, ir.DoubleType())


@intrinsic
def put_double(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a float64 at an address."""
    return _store(types.float64, ir.DoubleType())


@intrinsic
def single_at(typing_context: Any, address: Any) -> Any:
    """Return the float32 at an address."""
    return _load(types.float32, ir.FloatType())


@intrinsic
def put_single(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a float32 at an address."""
    return _store(types.float32, ir.FloatType())


def _call(bits: int, count: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(bits), [_WORD] * count)
        found = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return found if bits == 64 else builder.zext(found, _WORD)

    return types.int64(*[types.int64] * (count + 1)), generate


def _load(result: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))

    return result(types.int64), generate


def _store(value: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], kind.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, value), generate
