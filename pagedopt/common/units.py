"""Bytes, rates, times and counts of parameters as texts, parsed and printed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}
#: The most parameters of a model: their bytes in any format still fit into 64 bits.
MAX_PARAMETERS = 10**14


def parse_bytes(value: int | str, name: str = "device_budget") -> int:
    """Return bytes from an integer (of NumPy, too) or a text such as ``"2GiB"`` or ``"500 MB"``.

    Raises ValueError for another text or a negative number, TypeError for another type.
    """
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise TypeError(f"{name} is {value!r}; give bytes as an integer or a text as '2GiB'")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d{1,4000}(?:\.\d{0,4000})?)\s*([kmgt]i?|)b?\s*", value.lower())
        if not found:
            raise ValueError(f"{name} is {value!r}; give bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
        return int(Fraction(found[1]) * _BYTES[found[2]])  # a float would round from 2**53 bytes on
    if value < 0:
        raise ValueError(f"{name} is {value}; it cannot be negative")
    return int(value)


#: A time: its number, and its unit.
SECONDS_TEXT = re.compile(rf"\s*(\d+(?:\.\d*)?)\s*({'|'.join(_SECONDS)})\s*")


def parse_seconds(value: str, name: str) -> float:
    """Return seconds from a time above zero such as ``"20 ms"``, ``"1.5 s"`` or ``"300 µs"``; else ValueError."""
    found = SECONDS_TEXT.fullmatch(value)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {value!r}; give a time above zero with its unit, as '20 ms' or '1.5 s'")
    return seconds


def parse_count(value: int | float | str, name: str = "params") -> int:
    """Return a number of parameters from an integer, ``7e9``, or a text such as ``"7B"``, ``"124M"``, ``"1.5 b"``.

    Raises ValueError for another text, a fraction, or a number outside of 1 … 10^14, TypeError for another type.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name} is {value!r}; give a number, or a text as '7B' or '124M'")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d*)?(?:e\d{1,2})?)\s*([kmbgt]?)\s*", value.lower())
        if not found:
            raise ValueError(f"{name} is {value!r}; give a number of parameters, as 7000000000, 7e9, 7B or 124M")
        value = float(found[1].replace(",", "").replace("_", "")) * _COUNTS[found[2]]
    if not (math.isfinite(value) and 1 <= value <= MAX_PARAMETERS):
        raise ValueError(f"{name} is {value:g}; it must be between 1 and {MAX_PARAMETERS:.0e}")
    if abs(value - round(value)) > 1e-6 * value:
        raise ValueError(f"{name} is {value:g}; it must be a whole number of parameters")
    return round(value)


def text_of_bytes(nbytes: float) -> str:
    """Return bytes in the largest binary unit of which there is at least one.

    >>> text_of_bytes(2147483648)
    '2.00 GiB'
    """
    return _scaled(nbytes, {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}) or f"{nbytes:.0f} B"


def text_of_count(number: int) -> str:
    """Return a number of parameters with a power of a thousand.

    >>> text_of_count(124475904)
    '124 M'
    """
    return _scaled(number, {"T": 10**12, "B": 10**9, "M": 10**6, "k": 10**3}) or str(number)


def text_of_rate(rate: float | None) -> str:
    """Return bytes a second with a power of a thousand; "unknown" for None.

    >>> text_of_rate(55.5e9)
    '55.5 GB/s'
    """
    if rate is None:
        return "unknown"
    return _scaled(rate, {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6}) or f"{rate:.0f} B/s"


def text_of_seconds(seconds: float | None) -> str:
    """Return seconds in the largest unit of which there is at least one; "unknown" for None.

    >>> text_of_seconds(0.0431)
    '43.1 ms'
    """
    if seconds is None:
        return "unknown"
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6}) or (f"{seconds * 1e6:.2f} µs" if seconds else "0 s")


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """Return a value with three digits (or all before the point) in the largest unit that it reaches; "" if none."""
    for unit, size in units.items():
        if abs(value) >= size:
            many = value / size
            shown = f"{many:.2f}" if many < 9.995 else f"{many:.1f}" if many < 99.95 else f"{many:,.0f}"
            return f"{shown} {unit}"
    return ""
