"""State in 8 bits in NumPy, written from the words of ``notes/int8.md`` and of nothing else: float32, in its order.

Blocks are rows of 256 elements, the last one filled with zeros.  Columns are (codes, absmax), as the formats have them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

F32 = np.float32
Array = npt.NDArray[Any]
BLOCK = 256
LEAST = F32(2.0**-94)
#: By root: the power of the largest code in float32, what decoding multiplies by, and the largest code that is lifted.
WHOLE, K, TOP = {3: F32(2048383), 4: F32(4228250624)}, {3: F32(1 / 2048383), 4: F32(1 / 65025)}, {3: 126, 4: 254}
SPECIAL, KIND = {3: -128, 4: 0}, {3: np.int8, 4: np.uint8}


class Draw(NamedTuple):
    """What random bits are made of: the optimizer's seed, the step (None: it counts none), the parameter's number, the
    rule's input, and the index in the parameter of the first element."""

    seed: int
    step: int | None
    number: int
    input: int
    first: int = 0


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> list[Array]:
    """Philox 4x32 with ten rounds (Salmon et al. 2011, figure 4): four words of 32 bits, for each of many counters."""
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for turn in range(10):
        k0, k1 = ((word + turn * weyl) % 2**32 for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        p, q = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (q >> shift) ^ b ^ np.uint64(k0), q & low, (p >> shift) ^ d ^ np.uint64(k1), p & low
    return [a, b, c, d]


def halves(blocks: Array, draw: Draw, lower: bool = False) -> Array:
    """16 random bits for each element of rows: h, or l."""
    assert draw.first % BLOCK == 0
    count, lanes = len(blocks), np.arange(32, dtype=np.uint64)
    place = (np.uint64(draw.first // BLOCK) + np.arange(count, dtype=np.uint64))[:, None] * np.uint64(32) + lanes
    place = place | np.uint64(lower << 63)
    when: Any = draw.step
    if when is None:
        bits = np.where(np.isfinite(blocks), blocks, F32(0)).view(np.uint32)
        when = np.bitwise_xor.reduce(bits, 1, initial=0)[:, None]
    counter = (place & np.uint64(0xFFFFFFFF), place >> np.uint64(32), when, draw.number)
    words = philox(counter, (draw.seed, draw.input // 2))
    found = np.zeros((count, 2, 32, 4), np.uint64)  # of a row: its halves, their lanes, four elements each
    for i, word in enumerate(words):
        found[:, i // 2, :, i % 2 * 2] = word & np.uint64(0xFFFF)
        found[:, i // 2, :, i % 2 * 2 + 1] = word >> np.uint64(16)
    if draw.input % 2 == 0:
        found = (found & np.uint64(255)) << np.uint64(8) | found >> np.uint64(8)
    return found.reshape(count, BLOCK).astype(F32)


def in_blocks(values: Array) -> Array:
    """Rows of 256 float32, zeros behind the last element."""
    with np.errstate(over="ignore"):
        flat = np.asarray(values).astype(F32)
    return np.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)


def absmax_of(blocks: Array) -> Array:
    """The largest finite magnitude of each row: 0 only where all elements are, else at least 2^-94."""
    most = np.where(np.isfinite(blocks), np.abs(blocks), F32(0)).max(1, initial=F32(0))
    return np.where((blocks != 0).any(1), np.maximum(most, LEAST), F32(0))


def shares(root: int, blocks: Array, absmax: Array, drawn: bool) -> Array:
    """q of each element."""
    whole = WHOLE[root]
    scale = whole / absmax
    if drawn:
        scale = np.where(scale * absmax < whole, np.nextafter(scale, F32(np.inf)), scale)
    q = (np.abs(blocks) if root == 3 else blocks) * scale[:, None]
    return q if root == 3 else np.maximum(q, F32(1))


def floor_of(root: int, q: Array) -> Array:
    """The largest integer whose power is not above q, at most ``TOP``: found among all of them, in integers."""
    powers = np.arange(TOP[root] + 1, dtype=np.float64) ** root  # below 2**53, so exact
    return (np.searchsorted(powers, q.astype(np.float64), side="right") - 1).astype(F32)


def lifted(root: int, q: Array, h: Array, low: Array) -> tuple[Array, Array]:
    """f of each q, and whether these bits lift it to f + 1."""
    f = floor_of(root, q)
    wide = f.astype(np.float64)
    d = ((wide + 1) ** root - wide**root).astype(F32)
    power = (wide ** (root - 2)).astype(F32)
    r = (q.astype(np.float64) - (f * f).astype(np.float64) * power).astype(F32)
    # fma(-h / 65536, d, r): h / 65536 and d have 40 bits together and r is d at most, so float64 has all of them
    left = (r.astype(np.float64) - h.astype(np.float64) / 65536 * d).astype(F32)
    return f, (low + F32(0.5)) * F32(2.0**-32) * d < left


def encode(root: int, values: Array, draw: Draw | None = None) -> tuple[Array, Array]:
    """The columns of values: to nearest, or with ``draw`` stochastic in value."""
    blocks = in_blocks(values)
    absmax = absmax_of(blocks)
    with np.errstate(all="ignore"):
        q = np.nan_to_num(shares(root, blocks, absmax, draw is not None), nan=1)
        if draw is not None:
            f, up = lifted(root, q, halves(blocks, draw), halves(blocks, draw, lower=True))
            codes = f + up
        elif root == 3:
            odd = np.arange(1, 254, 2, dtype=np.float64) ** 3
            codes = np.searchsorted(odd, q.astype(np.float64) * 8, side="right").astype(F32)
        else:
            codes = np.rint(np.sqrt(np.sqrt(np.minimum(q, WHOLE[4]))))
        codes = np.where(blocks < 0, -codes, codes)
        codes = np.where(np.isfinite(blocks), codes, F32(SPECIAL[root]))
        codes = np.where(absmax[:, None] > 0, codes, F32(0))
    return codes.astype(KIND[root]).reshape(-1)[: len(values)], absmax


def decode(root: int, codes: Array, absmax: Array) -> Array:
    """The values of codes.  A second moment's 0 is infinity, but in a block of zeros."""
    c = codes.astype(F32)
    largest = np.repeat(absmax, BLOCK)[: len(codes)]
    if root == 3:
        with np.errstate(over="ignore"):  # of -128
            return np.where(codes == -128, F32(np.nan), ((c * c) * (c * K[3])) * largest)
    t = (c * c) * K[4]
    return np.where((codes == 0) & (largest > 0), F32(np.inf), (t * t) * largest)


def decode2(codes: Array, absmax: Array) -> Array:
    """The values of codes of root 2, which first moments had in files of before."""
    c = codes.astype(F32)
    with np.errstate(over="ignore"):
        values = ((c * np.abs(c)) * F32(1 / 16129)) * np.repeat(absmax, BLOCK)[: len(codes)]
    return np.where(codes == -128, F32(np.nan), values)
