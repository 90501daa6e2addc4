"""Numbers as people write and read them: bytes, rates, times and counts of parameters."""

from __future__ import annotations

import math
import re

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
#: More parameters than this are a slip of the keyboard; the arithmetic is in 64 bits.
MOST_PARAMETERS = 10**15


def parse_count(value: int | float | str, name: str = "params") -> int:
    """A number of parameters: an integer, ``7e9``, or a text as ``"7B"``, ``"124M"``, ``"1.5 b"``.

    Raises:
        ValueError: it is no such text, not a whole number, or not in 1 … 10^15.
        TypeError: it is neither a number nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name} is {value!r}; give a number, or a text as '7B' or '124M'")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d*)?(?:e\d{1,2})?)\s*([kmbgt]?)\s*", value.lower())
        if not found:
            raise ValueError(f"{name} is {value!r}; give a number of parameters, as 7000000000, 7e9, 7B or 124M")
        value = float(found[1].replace(",", "").replace("_", "")) * _COUNTS[found[2]]
    if not (math.isfinite(value) and 1 <= value <= MOST_PARAMETERS):
        raise ValueError(f"{name} is {value:g}; it must be between 1 and {MOST_PARAMETERS:.0e}")
    if abs(value - round(value)) > 1e-6 * value:
        raise ValueError(f"{name} is {value:g}; it must be a whole number of parameters")
    return round(value)


def text_of_bytes(nbytes: float) -> str:
    """
    >>> text_of_bytes(2147483648)
    '2.00 GiB'
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def text_of_count(number: int) -> str:
    """
    >>> text_of_count(124475904)
    '124 M'
    """
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{_digits(number / size)} {unit}"
    return str(number)


def text_of_rate(rate: float | None) -> str:
    """
    >>> text_of_rate(55.5e9)
    '55.5 GB/s'
    """
    if rate is None:
        return "unknown"
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if rate >= size:
            return f"{_digits(rate / size)} {unit}"
    return f"{rate:.0f} B/s"


def text_of_seconds(seconds: float | None) -> str:
    """
    >>> text_of_seconds(0.0431)
    '43.1 ms'
    """
    if seconds is None:
        return "unknown"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0 s"


def _digits(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
