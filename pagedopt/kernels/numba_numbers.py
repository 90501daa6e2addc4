"""Functions that generated CPU kernels call: pointers, conversions of 16-bit floats, arithmetic on elements."""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..system.compile_text import turn_jit_on

turn_jit_on()  # before functions are decorated


@intrinsic
def pointer(typing_context, address):
    """Convert an address to a pointer for ``numba.carray``, inside functions that Numba compiles.

    Args:
        address: int64 or uint64, a word of :attr:`~pagedopt.DeviceTable.rows`.

    Returns:
        a void pointer, whose dtype is an argument of ``carray``.  It does not keep the memory alive.

    Example:
        >>> x = numba.carray(pointer(rows[i, 0]), rows[i, 1], np.float32)
    """

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def asked(typing_context, address):
    """Call the C function ``int f(void)`` at an address."""

    def generate(context, builder, signature, arguments):
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.IntType(32), []).as_pointer())
        return builder.sext(builder.call(function, []), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def succeeds(typing_context, kernel, scalars, rows, chunks, chunk_numel, first, last):
    """Call a kernel that Numba has compiled, at its address; False: it has raised.

    A caller that imported the kernel would make Numba compile the kernel a second time.
    """
    kinds = [scalars, rows, chunks, chunk_numel, first, last]

    def generate(context, builder, signature, arguments):
        convention = context.call_conv
        function = builder.inttoptr(arguments[0], convention.get_function_type(types.none, kinds).as_pointer())
        return convention.call_function(builder, function, types.none, kinds, arguments[1:])[0].is_ok

    return types.boolean(kernel, *kinds), generate


@intrinsic
def float_of(typing_context, bits):
    """Reinterpret uint32 bits as float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of(typing_context, value):
    """Reinterpret a float32 as uint32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@njit
def from_bfloat16(bits):
    return float_of(np.uint32(bits) << np.uint32(16))


@njit
def to_bfloat16(value):
    """Round to nearest, ties to even."""
    bits = bits_of(value)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0x7FFF) if nan else np.uint16(rounded)


_EXPAND = np.float32(2.0**112)  # from the exponent bias of float16 to that of float32; exact for denormals too


@njit
def from_half(bits):
    wide = np.uint32(bits)
    magnitude = float_of((wide & np.uint32(0x7FFF)) << np.uint32(13)) * _EXPAND
    out = bits_of(magnitude)
    if (wide & np.uint32(0x7C00)) == np.uint32(0x7C00):  # infinity and NaN keep an exponent of ones
        out = out | np.uint32(0x7F800000)
    return float_of(out | ((wide & np.uint32(0x8000)) << np.uint32(16)))


@njit
def to_half(value):
    """Round to nearest, ties to even; 65,520 and more becomes infinity."""
    bits = bits_of(value)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    if size > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if size >= np.uint32(0x47800000):  # 65536 and more
        return np.uint16(sign | np.uint32(0x7C00))
    if size < np.uint32(0x38800000):  # below 2**-14: adding 0.5 leaves the rounded denormal in the low bits
        small = bits_of(float_of(size) + np.float32(0.5)) - np.uint32(0x3F000000)
        return np.uint16(sign | small)
    rounded = size - np.uint32(0x38000000) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
    return np.uint16(sign | (rounded >> np.uint32(13)))


@njit
def element_sqrt(x):
    return math.sqrt(x)


@njit
def element_exp(x):
    return math.exp(x)


@njit
def element_log(x):
    return math.log(x)


@njit
def element_tanh(x):
    return math.tanh(x)


@njit
def element_abs(x):
    return abs(x)


@njit
def element_sign(x):
    return (x > 0) - (x < 0)


@njit
def element_max(a, b):
    """Return the larger number, or NaN if one is NaN, as torch.maximum does."""
    return a if (a > b or a != a) else b


@njit
def element_min(a, b):
    """Return the smaller number, or NaN if one is NaN, as torch.minimum does."""
    return a if (a < b or a != a) else b


@intrinsic
def element_fma(typing_context, a, b, c):
    """Return a * b + c, rounded once, in the widest float type among them."""
    number = max((t for t in (a, b, c) if isinstance(t, types.Float)), key=lambda t: t.bitwidth, default=types.float64)

    def generate(context, builder, signature, arguments):
        return builder.fma(*(context.cast(builder, x, t, number) for x, t in zip(arguments, (a, b, c), strict=True)))

    return number(a, b, c), generate
