"""The statements for Numba that load and store parameters of 16 bits, of which ``sixteen.cuh`` does the same."""

from __future__ import annotations

import textwrap

from .int8_text import DRAW

# `drawn` has the upper 8 or all 16 random bits of element i.
_AT_RANDOM = """
words = np.empty(640, np.uint32)
parts = words.view(np.float32)
when, again, swapped = np.uint32(seed & 0xFFFFFFFF), 0, input % 2 == 0
begin = 0
while begin < live:
    first = (index + begin) % 256
    block = np.uint64((index + begin) // 256) * np.uint64(32)
{draw}
    count = min(live - begin, 256 - first)
    for j in range(count):
        i = begin + j
        random = np.uint32(np.int32(parts[first + j]))
        bits = bits_of(np.float32(x[i]))
        size = bits & np.uint32(0x7FFFFFFF)
{put}
    begin += count
"""
_LIFTED = """\
lifted = np.uint32(min(np.uint32(size + {up}), np.uint32(0x7F7FFFFF)))
lifted = (bits & np.uint32(0x80000000)) | (lifted if size < np.uint32(0x7F800000) else size)
"""
_BFLOAT16 = f"""\
{_LIFTED.format(up="random")}
elements[i] = np.uint16(lifted >> np.uint32(16)) if size <= np.uint32(0x7F800000) else np.uint16(0x7FFF)
"""
_FLOAT16 = """\
units = float_of(size) * np.float32(16777216)
whole = np.uint32(min(units, np.float32(1024)))
up = (np.float32(random) + np.float32(0.5)) * np.float32(2.0**-16) < units - np.float32(whole)
half = np.uint32(min(np.uint32(size + (random >> np.uint32(3))), np.uint32(0x477FFFFF)) - np.uint32(0x38000000))
half = half >> np.uint32(13) if size >= np.uint32(0x38800000) else whole + np.uint32(up)
half = half | ((bits >> np.uint32(16)) & np.uint32(0x8000))
elements[i] = np.uint16(half) if size < np.uint32(0x477FF000) else _numbers.to_half(np.float32(x[i]))
"""
_SPLIT = """\
high = np.uint32({bits} + np.uint32(0x8000)) >> np.uint32(16)
rest = np.int32({bits} - (high << np.uint32(16)))
elements[i] = np.uint16(high) if size <= np.uint32(0x7F800000) else np.uint16(0x7FC0)
{low}[i] = {kind}(rest >> {shift}) if size <= np.uint32(0x7F800000) else {kind}(0)
"""
_EXACT = """
for i in range(live):
    bits = bits_of(np.float32(x[i]))
    size = bits & np.uint32(0x7FFFFFFF)
{put}
"""
_JOIN = """
for i in range(live):
    high = np.uint32(elements[i])
    size, rest = high & np.uint32(0x7FFF), np.int32({low}[i]) << {shift}
    alone = (size == np.uint32(0) and rest < 0) or (size == np.uint32(0x7F80) and rest > 0)
    x[i] = S(float_of(np.uint32((high << np.uint32(16)) + np.uint32(0 if alone else rest))))
"""
LOADS = {
    "bfloat16": "\nfor i in range(live):\n    x[i] = S(_numbers.from_bfloat16(elements[i]))\n",
    "float16": "\nfor i in range(live):\n    x[i] = S(_numbers.from_half(elements[i]))\n",
    16: _JOIN.format(low="low16", shift=0),
    8: _JOIN.format(low="low8", shift=8),
}


def _drawn(put: str) -> str:
    draw, put = textwrap.indent(DRAW.rstrip(), "    "), textwrap.indent(put.rstrip(), "        ")
    return _AT_RANDOM.format(draw=draw, put=put)


_OF_8 = _LIFTED.format(up="(random >> np.uint32(8))")
STORES = {
    "bfloat16": _drawn(_BFLOAT16),
    "float16": _drawn(_FLOAT16),
    16: _EXACT.format(put=textwrap.indent(_SPLIT.format(bits="bits", low="low16", kind="np.int16", shift=0), "    ")),
    8: _drawn(_OF_8 + _SPLIT.format(bits="lifted", low="low8", kind="np.int8", shift=8)),
}
