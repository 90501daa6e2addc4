"""Few cases that hold every pair of values of any two factors, and all combinations of some factors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]
#: (a factor, the index of its value, another factor, the index of its value)
Pair = tuple[str, int, str, int]


def cover(factors: Mapping[str, Sequence[Any]], together: Sequence[str]) -> list[Case]:
    """Cases with a value of each factor: all combinations of those in ``together``, and all pairs of any two.

    Greedy: every case gets the values by which it holds most pairs that no case before it holds.
    """
    left = pairs_of(factors)
    found: list[dict[str, int]] = []
    for given in itertools.product(*(range(len(factors[name])) for name in together)):
        found.append(_completed(dict(zip(together, given, strict=True)), factors, left))
    while left:
        a, i, b, j = min(left)
        found.append(_completed({a: i, b: j}, factors, left))
    return [{name: factors[name][i] for name, i in case.items()} for case in found]


def pairs_of(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """All pairs of values."""
    return {
        (a, i, b, j)
        for a, b in itertools.combinations(factors, 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }


def _completed(case: dict[str, int], factors: Mapping[str, Sequence[Any]], left: set[Pair]) -> dict[str, int]:
    for name in factors:
        if name not in case:
            new = {i: len(_held({**case, name: i}, factors) & left) for i in range(len(factors[name]))}
            case[name] = max(new, key=lambda i: new[i])
    left -= _held(case, factors)
    return {name: case[name] for name in factors}


def _held(case: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    names = [name for name in factors if name in case]
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}
