"""Rules whose prologues are played: every operation that hyperparameters may have, and names that C++ uses, too."""

from __future__ import annotations

import math
from math import exp, log, tanh

import numpy as np
import rules_under_test
from hypothesis import strategies as st

from pagedopt.rules import RULES, Rule, fma, rule, sign, sqrt


def shape(low, high, most=math.inf):  # type: ignore[no-untyped-def]
    """For a rule to call."""
    middle = (low + high) / 2
    return min(middle, most), max(-most, high - low)


@rule
def divided(x, *, a, b, c, step):  # type: ignore[no-untyped-def]
    """Operations that IEEE rounds alike everywhere."""
    turn = step % 7 - a % b + b % -3
    whole = a // b + step // 10 - c // -0.7
    rest = (a > b) % -2
    down = (a > b) // -2
    root = sqrt(abs(c))
    fused = fma(a, b, c)
    lazy = 1 / a if a != 0 else 7 // 2 + 7 % -4 - 1 / 3 + 10**3 + 2**-1
    large = c * (10**17 + 1 - 10**17)
    return x * turn + x * whole + x * rest + x * down + x * root + x * fused + x * lazy + x * large


@rule
def compared(x, *, a, b, c, flag):  # type: ignore[no-untyped-def]
    """Choices, truth values, and ints, which have no negative zero; nothing here raises."""
    least = min(a, b)
    most = max(a, b)
    low, high = shape(least, most)
    chained = 1 if -1 < a <= b < 2 else -1
    both = a if a > 0 and b > 0 and (a != b) else b
    either = a if a < 0 or not b else 2 * b
    neither = (a if a == b else b) if not (flag > 0 or not c) else 0
    counted = (a > 0) + (b > 0) - 3 * (not a) + (a > 0) / ((b > 0) + 1)
    truth = a < b < c
    zero = -(a > b)
    times = (a > b) * -1
    again = -zero
    chosen = -(1 if a > b else 0)
    half = -((a > b) / 2)
    denied = -(not (a > b and c))
    picked = -max(a > b, 0) - abs(-(b > c))
    negative = -flag
    signs = sign(a) * sign(-c)
    x = x * least + x * most + x * low + x * high + x * chained + x * both + x * either + x * neither + x * counted
    return (
        x * truth
        + x * zero
        + x * times
        + x * again
        + x * chosen
        + x * half
        + x * denied
        + x * picked
        + x * negative
        + x * signs
    )


@rule
def smooth(x, *, a, b, step):  # type: ignore[no-untyped-def]
    """Functions of the C library."""
    fading = exp(-abs(a)) * log(1 + abs(b))
    powers = abs(a) ** b + a**2 - b**3 + abs(b) ** 0.5 + 2**a
    return x * fading + x * powers + x * (1 - 0.97**step) + x * exp(1) + x * tanh(a / 3)


@rule
def named(x, *, β1, pow, fabs, fmod, python, h, scalars, uniforms, word, carried, prologue):  # type: ignore[no-untyped-def]
    """Words of the kernel, and a letter that NVRTC does not take."""
    floor = β1**2 * pow % python
    return x * floor + h * abs(fabs) // fmod - scalars * uniforms**2 + word * carried * prologue


@rule
def raising(x, *, a, b):  # type: ignore[no-untyped-def]
    """Each of these may raise."""
    return x * (a / b) + x * (a % b) + x * (a // b) + x * a**b + x * sqrt(a) + x * log(a) + x * exp(a)


_OTHERS = [r for r in vars(rules_under_test).values() if isinstance(r, Rule)]
#: Rules whose numbers have the same bits on every device.
EXACT = (divided, compared)
#: Every rule with uniforms, by name.
SUBJECTS: dict[str, Rule] = {r.name: r for r in (*RULES.values(), *_OTHERS, *EXACT, smooth, named) if r.uniform_count}

_SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, -7.0, 1e-300, 1e17, math.inf, -math.inf, math.nan)
_SOME = st.one_of(st.floats(-9, 9), st.sampled_from(_SPECIAL))
_SHARE = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]))
_FLAG = st.sampled_from([0.0, 1.0])
_STEP = st.one_of(st.integers(1, 100), st.integers(1, 10**6)).map(float)
_BY_NAME = {"step": _STEP, "mu_product": _SHARE, "weight_decay": st.one_of(st.just(0.0), st.floats(0, 1))}
_BY_NAME |= dict.fromkeys(("maximize", "nesterov", "flag"), _FLAG) | dict.fromkeys(("beta1", "beta2"), _SHARE)


def sets_of(subject: Rule) -> st.SearchStrategy[dict[str, float]]:
    """Hyperparameters of a rule."""
    return st.fixed_dictionaries({name: _BY_NAME.get(name, _SOME) for name in subject.scalars})


def common_sets(subject: Rule, count: int, most: int = 1000) -> list[dict[str, float]]:
    """Hyperparameters between 0.1 and 0.9, and steps from 1 to ``most``."""
    generator = np.random.default_rng(5)
    sets = [{name: float(generator.uniform(0.1, 0.9)) for name in subject.scalars} for _ in range(count)]
    return [s | {"step": float(generator.integers(1, most + 1))} if "step" in s else s for s in sets]
