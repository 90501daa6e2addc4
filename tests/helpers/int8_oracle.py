"""State in 8 bits in NumPy, written from the words of issue 30 and of nothing else: float32, in the order said there.

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
#: Of root 2: 127 squared, what a square is at least, and what a code's square is multiplied by.
SQUARE, SMALL, K1 = F32(16129), F32(1e-6), F32(1 / 16129)
#: Of root 4: the fourth power of 255 in float32, and what a code's square is multiplied by.
FOURTH, K2 = F32(4228250624), F32(1 / 65025)


class Draw(NamedTuple):
    """What random bits are made of: the optimizer's seed, the step, the parameter's number, the rule's input, and the
    index in the parameter of the first element."""

    seed: int
    step: int
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


def halves(numel: int, draw: Draw) -> Array:
    """16 random bits for each of ``numel`` elements: a call of Philox serves eight elements of a block, the four from
    4 * lane on and the four from 128 + 4 * lane on; the lower half of a word comes first."""
    assert draw.first % BLOCK == 0
    blocks = -(-numel // BLOCK)
    places = np.uint64(32 * (draw.first // BLOCK)) + np.arange(32 * blocks, dtype=np.uint64)
    low, high = places & np.uint64(0xFFFFFFFF), places >> np.uint64(32)
    words = philox((low, high, draw.step, draw.number), (draw.seed, draw.input))
    parts = np.stack([half for word in words for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))])
    by_block = parts.reshape(2, 4, blocks, 32)  # the eighths of a block's half, then its lanes
    return by_block.transpose(2, 0, 3, 1).reshape(-1)[:numel].astype(F32)


def in_blocks(values: Array) -> Array:
    """Rows of 256 float32, zeros behind the last element."""
    with np.errstate(over="ignore"):
        flat = np.asarray(values).astype(F32)
    return np.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)


def absmax_of(blocks: Array) -> Array:
    """The largest finite magnitude of each row: 0 only where all elements are, else at least 2^-94."""
    most = np.where(np.isfinite(blocks), np.abs(blocks), F32(0)).max(1, initial=F32(0))
    return np.where((blocks != 0).any(1), np.maximum(most, LEAST), F32(0))


def encode2(values: Array) -> tuple[Array, Array]:
    """Root 2, to nearest; -128 is NaN, and stands for infinities too."""
    blocks = in_blocks(values)
    absmax = absmax_of(blocks)
    with np.errstate(all="ignore"):
        scaled = np.abs(blocks) * (SQUARE / absmax)[:, None]
        root = np.rint(np.sqrt(np.maximum(np.minimum(scaled, SQUARE), SMALL)))
        codes = np.where(blocks < 0, -root, root)
        codes = np.where(np.isfinite(blocks), codes, F32(-128))
        codes = np.where(absmax[:, None] > 0, codes, F32(0))
    return codes.astype(np.int8).reshape(-1)[: len(values)], absmax


def decode2(codes: Array, absmax: Array) -> Array:
    """The values of codes of root 2."""
    c = codes.astype(F32)
    with np.errstate(over="ignore"):  # of -128
        values = ((c * np.abs(c)) * K1) * np.repeat(absmax, BLOCK)[: len(codes)]
    return np.where(codes == -128, F32(np.nan), values)


def encode4(values: Array, draw: Draw | None = None) -> tuple[Array, Array]:
    """Root 4: to nearest, or with ``draw`` stochastic in value; what is not finite has code 0."""
    blocks = in_blocks(values)
    absmax = absmax_of(blocks)
    with np.errstate(all="ignore"):
        q = np.sqrt(np.maximum(np.minimum(blocks * (FOURTH / absmax)[:, None], FOURTH), F32(1)))
        z = np.sqrt(q)
        if draw is None:
            codes = np.rint(z)
        else:
            u = (halves(blocks.size, draw) / F32(65536)).reshape(blocks.shape)
            f = np.minimum(np.rint(z - F32(0.5)), F32(254))
            d = F32(2) * f + F32(1)
            up = u * (d * (f * f + f * f + d)) < (q - f * f) * (q + f * f)
            codes = np.where(blocks == absmax[:, None], F32(255), f + up.astype(F32))
        codes = np.where(np.isfinite(blocks) & (absmax[:, None] > 0), codes, F32(0))
    return codes.astype(np.uint8).reshape(-1)[: len(values)], absmax


def decode4(codes: Array, absmax: Array) -> Array:
    """The values of codes of root 4: 0 is infinity, but in a block of zeros."""
    c = codes.astype(F32)
    largest = np.repeat(absmax, BLOCK)[: len(codes)]
    t = (c * c) * K2
    return np.where((codes == 0) & (largest > 0), F32(np.inf), (t * t) * largest)
