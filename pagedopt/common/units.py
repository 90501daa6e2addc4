"""Numbers as people write and read them: bytes, rates, times and counts of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30,
          "ti": 1 << 40}  # fmt: skip
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}
#: No model has more parameters; their bytes in any format fit into 64 bits.
MOST_PARAMETERS = 10**14


def parse_bytes(value: int | str, name: str = "device_budget") -> int:
    """A number of bytes, or a text as ``"2GiB"``, ``"500 MB"``, as bytes.

    Raises:
        ValueError: it is negative, or no such text.
        TypeError: it is neither an integer nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name} is {value!r}; give bytes as an integer or a text as '2GiB'")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d{1,4000}(?:\.\d{0,4000})?)\s*([kmgt]i?|)b?\s*", value.lower())
        if not found:
            raise ValueError(f"{name} is {value!r}; give bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
        return int(Fraction(found[1]) * _BYTES[found[2]])  # a float would round from 2**53 bytes on
    if value < 0:
        raise ValueError(f"{name} is {value}; it cannot be negative")
    return value


_SECONDS_TEXT = re.compile(rf"\s*(\d+(?:\.\d*)?)\s*({'|'.join(_SECONDS)})\s*")


def looks_like_seconds(value: object) -> bool:
    """Whether a value is a text of a number and a unit of time."""
    return isinstance(value, str) and _SECONDS_TEXT.fullmatch(value) is not None


def parse_seconds(value: str, name: str = "device_budget") -> float:
    """A time above zero as ``"20 ms"``, ``"1.5 s"`` or ``"300 µs"``, as seconds.

    Raises:
        ValueError: it is no such text.
    """
    found = _SECONDS_TEXT.fullmatch(value)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {value!r}; give a time above zero with its unit, as '20 ms' or '1.5 s'")
    return seconds


def parse_count(value: int | float | str, name: str = "params") -> int:
    """A number of parameters: an integer, ``7e9``, or a text as ``"7B"``, ``"124M"``, ``"1.5 b"``.

    Raises:
        ValueError: it is no such text, not a whole number, or not in 1 … 10^14.
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
    """Bytes in the largest binary unit that they fill.

    >>> text_of_bytes(2147483648)
    '2.00 GiB'
    """
    return _scaled(nbytes, {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}) or f"{nbytes:.0f} B"


def text_of_count(number: int) -> str:
    """A number of parameters, in thousands and their powers.

    >>> text_of_count(124475904)
    '124 M'
    """
    return _scaled(number, {"T": 10**12, "B": 10**9, "M": 10**6, "k": 10**3}) or str(number)


def text_of_rate(rate: float | None) -> str:
    """Bytes a second, in powers of a thousand; None: "unknown".

    >>> text_of_rate(55.5e9)
    '55.5 GB/s'
    """
    if rate is None:
        return "unknown"
    return _scaled(rate, {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6}) or f"{rate:.0f} B/s"


def text_of_seconds(seconds: float | None) -> str:
    """Seconds in the largest unit that they fill; None: "unknown".

    >>> text_of_seconds(0.0431)
    '43.1 ms'
    """
    if seconds is None:
        return "unknown"
    shown = _scaled(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})
    return shown or (f"{seconds * 1e6:.2f} µs" if seconds else "0 s")


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """A value in the first unit (largest first) that it fills, with three digits; "" if it fills none."""
    for unit, size in units.items():
        if abs(value) >= size:
            return f"{_digits(value / size)} {unit}"
    return ""


def _digits(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
