"""Parameters of 16 bits with nothing lost, in NumPy, written from the words of the formats and of nothing else.

Bits are those of float32, as int64; ``u`` are 16 random bits for each.  Columns are as the formats have them, as int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from int8_oracle import BLOCK, Array, Draw, halves

INFINITE, LARGEST, SIGN = 0x7F800000, 0x7F7FFFFF, 0x80000000


def bits_of(values: torch.Tensor) -> Array:
    """The bits of float32 numbers."""
    return values.float().numpy().view(np.uint32).astype(np.int64)


def drawn_for(numel: int, draw: Draw) -> Array:
    """16 random bits for each element of a parameter from ``draw.first`` on, wherever that is."""
    begin = draw.first % BLOCK
    blocks = np.zeros((-(-(begin + numel) // BLOCK), BLOCK), np.float32)
    return halves(blocks, draw._replace(first=draw.first - begin)).reshape(-1)[begin : begin + numel].astype(np.int64)


def lifted(bits: Array, up: Any) -> Array:
    """The magnitude moved up by so many of its last bits: a finite number stays finite, all else stays."""
    size = bits & ~SIGN
    return (bits & SIGN) | np.where(size < INFINITE, np.minimum(size + up, LARGEST), size)


def split(bits: Array, nan: Array) -> tuple[Array, Array]:
    """The nearest bfloat16, ties away from zero, and the signed rest."""
    high = np.where(nan, 0x7FC0, (bits + 0x8000) >> 16)
    return high, np.where(nan, 0, bits - (high << 16))


def stored(name: str, bits: Array, u: Array) -> tuple[Array, ...]:
    """The columns of a format."""
    size = bits & ~SIGN
    nan = size > INFINITE
    if name == "bfloat16+16":
        return split(bits, nan)
    if name == "bfloat16+8":
        high, rest = split(lifted(bits, u >> 8) & ~0xFF, nan)
        assert (rest % 256 == 0).all()
        return high, rest // 256
    if name.startswith("bfloat16"):
        return (np.where(nan, 0x7FFF, lifted(bits, u) >> 16),)
    values = np.where(size < INFINITE, size, 0).astype(np.uint32).view(np.float32).astype(np.float64)
    power = np.maximum(np.floor(np.log2(np.maximum(values, 2.0**-14))), -14)
    ulp = 2.0 ** (power - 10)
    whole = np.floor(values / ulp)
    part = values / ulp - whole
    normal = values >= 2.0**-14
    up = np.where(normal, part * 8192 + (u >> 3) >= 8192, (u + 0.5) / 65536 < part)
    found = np.minimum((whole + up) * ulp, 65504)
    found = np.where(size >= 0x477FF000, np.inf, found)
    halves_ = found.astype(np.float16).view(np.uint16).astype(np.int64)
    return (np.where(nan, 0x7E00, halves_) | (bits >> 16 & 0x8000),)


def number(name: str, columns: tuple[Array, ...]) -> Array:
    """The numbers that columns stand for, as float64."""
    if name.startswith("float16"):
        return columns[0].astype(np.uint16).view(np.float16).astype(np.float64)
    high, *rest = columns
    bits = (high << 16) + sum(low * (1 if name == "bfloat16+16" else 256) for low in rest)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)
