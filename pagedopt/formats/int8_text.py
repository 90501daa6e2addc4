"""The statements for Numba that load and store a block of int8, of which ``int8.cuh`` does the same."""

from __future__ import annotations

import textwrap
from typing import Literal, NamedTuple

#: How kernels round: to the nearest code; or at random, by bits of the step, or of the block's elements where no steps
#: are counted.
How = Literal["nearest", "by step", "by data"]

_ABSMAX = """
most = np.uint32(0)
for i in range(live):
    magnitude = bits_of(np.float32(x[i])) & np.uint32(0x7FFFFFFF)
    most = max(most, magnitude)
finite = most < np.uint32(0x7F800000)
if not finite:
    most = np.uint32(1)
    for i in range(live):
        magnitude = bits_of(np.float32(x[i])) & np.uint32(0x7FFFFFFF)
        if magnitude < np.uint32(0x7F800000):
            most = max(most, magnitude)
largest = float_of(most)
if most != np.uint32(0) and largest < np.float32(2.0**-94):
    largest = np.float32(2.0**-94)
absmax[0] = largest
if most == np.uint32(0):
    for i in range(live):
        {codes}[i] = 0
    return
"""
LOAD_3 = """
largest = absmax[0]
for i in range(live):
    code = np.float32(root3[i])
    value = ((code * code) * (code * np.float32(1 / 2048383))) * largest
    x[i] = S(value) if root3[i] != -128 else S(np.nan)
"""
LOAD_4 = """
largest = absmax[0]
zero = np.float32(np.inf) if largest > 0 else np.float32(0)
for i in range(live):
    code = np.float32(root4[i])
    root = (code * code) * np.float32(1 / 65025)
    value = (root * root) * largest
    x[i] = S(value) if root4[i] != 0 else S(zero)
"""
# A third of a float's bits are those of its cube root, by 3 %; one step of Newton's leaves 0.2 %.  What is made of it
# is corrected by comparing cubes, which are exact.
_CUBE_ROOT = """\
    root = float_of(np.uint32(bits_of(share) // np.uint32(3)) + np.uint32(0x2A514067))
    root = (root + root + share / (root * root)) * np.float32(1 / 3)
"""
_NEAREST_3 = f"""
scale = np.float32(16387064) / largest
magic = np.float32(12582912)
for i in range(live):
    share = element_abs(np.float32(x[i])) * scale
{_CUBE_ROOT}
    near = ((np.float32(0.5) * root + np.float32(0.5)) + magic) - magic
    odd = near + near - np.float32(1)
    near = near - np.float32(1) if (odd * odd) * odd > share else near
    root3[i] = np.int8(np.int32(near if x[i] > 0 else -near))
"""
_NEAREST_4 = """
scale = np.float32(4228250624) / largest
magic = np.float32(12582912)
for i in range(live):
    share = np.float32(x[i]) * scale
    share = share if share < np.float32(4228250624) else np.float32(4228250624)
    share = share if share > np.float32(1) else np.float32(1)
    root4[i] = np.uint8((element_sqrt(element_sqrt(share)) + magic) - magic)
"""
_BETWEEN_3 = f"""\
        share = element_abs(np.float32(x[i])) * scale
{textwrap.indent(_CUBE_ROOT, "    ")}
        low = (root + magic) - magic
        low = low - np.float32(1) if (low * low) * low > share else low
        low = low if low < np.float32(126) else np.float32(126)
        square = low * low
        rest = element_fma(-square, low, share)
        step = np.float32(3) * square + (np.float32(3) * low + np.float32(1))
"""
_BETWEEN_4 = """\
        share = np.float32(x[i]) * scale
        share = share if share > np.float32(1) else np.float32(1)
        low = (element_sqrt(element_sqrt(share)) + magic) - magic
        square = low * low
        low = low - np.float32(1) if element_fma(-square, square, share) < np.float32(0) else low
        low = low if low < np.float32(254) else np.float32(254)
        square = low * low
        rest = element_fma(-square, square, share)
        odd = np.float32(2) * low + np.float32(1)
        step = odd * (np.float32(2) * square + odd)
"""
# Philox 4x32 with 10 rounds, of the 32 counters of a block of 256 elements at once: a loop over arrays becomes one over
# vectors.  `parts`, a view as float32 of the 640 `words`, gets 16 random bits for each element from 256 * again on.
DRAW = """\
for lane in range(32):
    position = block + np.uint64(lane)
    words[512 + lane] = np.uint32(position & np.uint64(0xFFFFFFFF))
    words[544 + lane] = np.uint32(position >> np.uint64(32)) | np.uint32(again << 31)
    words[576 + lane] = when
    words[608 + lane] = np.uint32(row)
key = np.uint32(seed >> 32)
other = np.uint32(input // 2)
for turn in range(10):
    for lane in range(32):
        left = np.uint64(0xD2511F53) * np.uint64(words[512 + lane])
        right = np.uint64(0xCD9E8D57) * np.uint64(words[576 + lane])
        words[512 + lane] = np.uint32(right >> np.uint64(32)) ^ words[544 + lane] ^ key
        words[576 + lane] = np.uint32(left >> np.uint64(32)) ^ words[608 + lane] ^ other
        words[544 + lane] = np.uint32(right & np.uint64(0xFFFFFFFF))
        words[608 + lane] = np.uint32(left & np.uint64(0xFFFFFFFF))
    key = np.uint32((np.uint64(key) + np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF))
    other = np.uint32((np.uint64(other) + np.uint64(0xBB67AE85)) & np.uint64(0xFFFFFFFF))
for half in range(2):
    for lane in range(32):
        one, two = words[512 + 64 * half + lane], words[544 + 64 * half + lane]
        if swapped:
            one = ((one >> np.uint32(8)) & np.uint32(0xFF00FF)) | ((one & np.uint32(0xFF00FF)) << np.uint32(8))
            two = ((two >> np.uint32(8)) & np.uint32(0xFF00FF)) | ((two & np.uint32(0xFF00FF)) << np.uint32(8))
        at = 256 * again + 128 * half + 4 * lane
        parts[at] = np.float32(np.int32(one & np.uint32(0xFFFF)))
        parts[at + 1] = np.float32(np.int32(one >> np.uint32(16)))
        parts[at + 2] = np.float32(np.int32(two & np.uint32(0xFFFF)))
        parts[at + 3] = np.float32(np.int32(two >> np.uint32(16)))
"""
# The first pass draws the upper 16 bits of each element's u, beside lower ones that are all ones: what is lifted then
# is lifted whatever they are.  Where others are near, a second pass draws them.  All is in one array: each takes as
# long as 40 elements.
_AT_RANDOM = """
scale = np.float32({whole}) / largest
if scale * largest < np.float32({whole}):
    scale = float_of(bits_of(scale) + np.uint32(1))
magic = np.float32(12582912)
when = {when}
words = np.empty(640, np.uint32)
parts = words.view(np.float32)
for i in range(256):
    parts[256 + i] = np.float32(65535)
block = np.uint64(index) // np.uint64(256) * np.uint64(32)
swapped = input % 2 == 0
for again in range(2):
{draw}
    near = np.uint32(0)
    for i in range(live):
{between}
        left = element_fma(-(parts[i] * np.float32(1 / 65536)), step, rest)
        lower = (parts[256 + i] + np.float32(0.5)) * np.float32(2.0**-32)
        up = lower * step < left
        near = np.uint32(near | np.uint32((left >= np.float32(0)) & (not up)))
        size = low + np.float32(1) if up else low
        {put}
    if near == 0:
        break
"""
_BY_STEP = "np.uint32(seed & 0xFFFFFFFF)"
_BY_DATA = """np.uint32(0)
for i in range(live):
    bits = bits_of(np.float32(x[i]))
    when ^= bits if (bits & np.uint32(0x7FFFFFFF)) < np.uint32(0x7F800000) else np.uint32(0)"""
_NOT_FINITE = """
if not finite:
    for i in range(live):
        if not element_abs(np.float32(x[i])) < np.float32(np.inf):
            {codes}[i] = {code}
"""


class _Texts(NamedTuple):
    """What a root has of its own: the largest code's power in float32, statements, the code of what is not finite."""

    whole: str
    nearest: str
    between: str
    put: str
    not_finite: str


_ROOTS = {
    3: _Texts("2048383", _NEAREST_3, _BETWEEN_3, "root3[i] = np.int8(np.int32(size if x[i] > 0 else -size))", "-128"),
    4: _Texts("4228250624", _NEAREST_4, _BETWEEN_4, "root4[i] = np.uint8(np.int32(size))", "0"),
}


def store(root: int, how: How) -> str:
    """Return the statements that store a block by this root."""
    codes, texts = f"root{root}", _ROOTS[root]
    text = texts.nearest
    if how != "nearest":
        when = _BY_STEP if how == "by step" else _BY_DATA
        draw = textwrap.indent(DRAW.rstrip(), "    ")
        text = _AT_RANDOM.format(whole=texts.whole, draw=draw, between=texts.between, put=texts.put, when=when)
    return _ABSMAX.format(codes=codes) + text + _NOT_FINITE.format(codes=codes, code=texts.not_finite)
