"""Rules that exercise one part of the language each, with what they must compute said in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedopt.rules import Rule, exp, fma, log, rule, sign, sqrt, tanh

Outcome = tuple[torch.Tensor, ...]


@rule
def extremes(a, b, low, high, sign_a):  # type: ignore[no-untyped-def]
    """Hands NaN on."""
    low = min(a, b)
    high = max(a, b)
    sign_a = sign(a)
    return low, high, sign_a


def extremes_in_torch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> Outcome:
    return torch.minimum(a, b), torch.maximum(a, b), torch.sign(a)


@rule
def choices(a, b, chained, both, either, neither, counted):  # type: ignore[no-untyped-def]
    """Conditions of every kind; a NaN is true and compares with nothing."""
    chained = 1 if -1 < a <= b < 2 else -1
    both = a if a > 0 and b > 0 and (a != b) else b
    either = a if a < 0 or not b else 2 * b
    neither = (a if a == b else b) if not (a or b >= 1) else 0
    counted = (a > 0) + (b > 0) - 3 * (not a) + (a > 0) / ((b > 0) + 1)
    return chained, both, either, neither, counted


def choices_in_torch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> Outcome:
    one, number = torch.ones_like(a), a.dtype
    chained = torch.where((a > -1) & (a <= b) & (b < 2), one, -one)
    both = torch.where((a > 0) & (b > 0) & (a != b), a, b)
    either = torch.where((a < 0) | ~b.bool(), a, 2 * b)
    neither = torch.where(~(a.bool() | (b >= 1)), torch.where(a == b, a, b), torch.zeros_like(a))
    p, q = (a > 0).to(number), (b > 0).to(number)
    return chained, both, either, neither, p + q - 3 * (~a.bool()).to(number) + p / (q + 1)


@rule
def powers(a, square, cube, minus):  # type: ignore[no-untyped-def]
    """Small powers are products; a sign binds less than a power."""
    square = (a + 1) ** 2
    cube = a**3
    minus = -(a**2) + +a
    return square, cube, minus


def powers_in_torch(a: torch.Tensor, *rest: torch.Tensor) -> Outcome:
    return (a + 1) * (a + 1), a * a * a, -(a * a) + a


@rule
def functions(a, root, power, logarithm, size, fused, bent):  # type: ignore[no-untyped-def]
    """Every function on elements, once."""
    root = sqrt(a)
    power = exp(-a)
    logarithm = log(a)
    size = abs(a)
    fused = fma(a, a, -a)
    bent = tanh(a)
    return root, power, logarithm, size, fused, bent


def functions_in_torch(a: torch.Tensor, *rest: torch.Tensor) -> Outcome:
    return a.sqrt(), torch.exp(-a), torch.log(a), a.abs(), a * a - a, torch.tanh(a)


@rule
def constants(a, b, zero, half, kept):  # type: ignore[no-untyped-def]
    """What varies per element may take one value for all, before and after it is read."""
    zero = 0.0
    kept = a - b
    b = -2
    kept = kept * b
    half = a
    half = 1 / 2
    return zero, half, kept


def constants_in_torch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> Outcome:
    return torch.zeros_like(a), torch.full_like(a, 0.5), (a - b) * -2


@rule
def filled(a, b, *, value):  # type: ignore[no-untyped-def]
    """The same with hyperparameters."""
    a = value
    b = b * a
    a = value / 2
    return a, b


@rule
def steps(a, b, *, rate, flag):  # type: ignore[no-untyped-def]
    """Reads what it overwrites: both results come from the values before; locals and += work."""
    mixed = a + b if flag else a - b
    mixed *= rate**0.5
    kept = a
    a = b - mixed
    b = kept + mixed * (1 - rate) / 3
    return a, b


def steps_in_torch(a: torch.Tensor, b: torch.Tensor, rate: float, flag: float) -> Outcome:
    mixed = (a + b if flag else a - b) * rate**0.5
    return b - mixed, a + mixed * (1 - rate) / 3


@rule
def many(
    a, b, *,
    s00, s01, s02, s03, s04, s05, s06, s07, s08, s09, s10, s11, s12, s13, s14, s15, s16, s17, s18, s19,
    s20, s21, s22, s23, s24, s25, s26, s27, s28, s29, s30, s31, s32, s33, s34,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """More hyperparameters than a warp has threads."""
    return (
        s00 * b + s01 * a + s02 * b + s03 * a + s04 * b + s05 * a + s06 * b + s07 * a + s08 * b + s09 * a +
        s10 * b + s11 * a + s12 * b + s13 * a + s14 * b + s15 * a + s16 * b + s17 * a + s18 * b + s19 * a +
        s20 * b + s21 * a + s22 * b + s23 * a + s24 * b + s25 * a + s26 * b + s27 * a + s28 * b + s29 * a +
        s30 * b + s31 * a + s32 * b + s33 * a + s34 * b
    )  # fmt: skip


MANY = {name: 1.0 + index / 64 for index, name in enumerate(many.scalars)}


def halved(value):  # type: ignore[no-untyped-def]
    """For a rule to call."""
    half = value / 2
    return half, -half


@rule
def carrying(a, b, *, scale, rate, count):  # type: ignore[no-untyped-def]
    """Changes hyperparameters, one of them twice; what was computed before keeps the old values."""
    before = scale * rate
    scale, less = halved(scale)
    a = a * before + scale
    scale *= rate
    count = 3
    b = b * scale + less + a * count
    return a, scale, b, count


def carrying_in_python(a, b, scale, rate, count):  # type: ignore[no-untyped-def]
    """New ``a`` and ``b``, ``scale`` and ``count``."""
    a = a * (scale * rate) + scale / 2
    return a, b * (scale / 2 * rate) - scale / 2 + a * 3, scale / 2 * rate, 3


@rule
def swap(a, b):  # type: ignore[no-untyped-def]
    """Two lists change places: every value is computed before the first is stored."""
    was = a
    a = b
    b = was
    return a, b


@rule
def copied(out_of, into):  # type: ignore[no-untyped-def]
    """Conversion between dtypes and nothing else."""
    into = out_of
    return into


#: name -> (rule, the same in torch, how near float32 must come in units of float32 rounding; 0 is bit for bit)
PARTS: dict[str, tuple[Rule, Callable[..., Outcome], float]] = {
    "extremes": (extremes, extremes_in_torch, 0),
    "choices": (choices, choices_in_torch, 0),
    "powers": (powers, powers_in_torch, 0),
    "functions": (functions, functions_in_torch, 4),
    "constants": (constants, constants_in_torch, 0),
}

_NAN, _INF = float("nan"), float("inf")
SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.7, 1e-40, -1e-40, 1e20, -1e20, 1e38, 3e38, -3e38, _INF, -_INF, _NAN,
)  # fmt: skip


def special_pairs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of the special values."""
    a, b = torch.meshgrid(torch.tensor(SPECIAL, dtype=dtype), torch.tensor(SPECIAL, dtype=dtype), indexing="ij")
    return a.flatten().contiguous(), b.flatten().contiguous()


def special_inputs(rule: Rule, dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor for each input of a rule: those named ``a`` and ``b`` are every pair of special values, others are 7."""
    pair = special_pairs(dtype)
    return [pair[i] if i < 2 and name in "ab" else torch.full_like(pair[0], 7) for i, name in enumerate(rule.inputs)]


def same_values(got: torch.Tensor, want: torch.Tensor, roundings: float = 0) -> bool:
    """Equal including NaN, infinities and (at zero roundings) the sign of zero; not what is in a NaN."""
    if roundings:
        eps = torch.finfo(got.dtype).eps
        return torch.allclose(got, want, rtol=roundings * eps, atol=torch.finfo(got.dtype).tiny, equal_nan=True)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.itemsize]
    numbers, others = (t.masked_fill(t.isnan(), 0).view(bits) for t in (got, want))
    return got.dtype is want.dtype and torch.equal(numbers, others) and torch.equal(got.isnan(), want.isnan())
