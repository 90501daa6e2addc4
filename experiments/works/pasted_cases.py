"""Pairs of functions to be one: as text that is pasted, and as rules that are composed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from experiments.works.pasted_text import CUDA, MIRRORED, SUM, Body, compiled, paste, text
from pagedopt import Rule, compose, multi_tensor_apply

WORKS, NAME, LOCAL, REDUCTION, ELSEWHERE, ROUNDED, TWICE = (
    "pointwise", "a local has the name of an argument", "both have a local of one name", "a reduction between",
    "the second reads other elements", "the list between rounds", "the list between is read later",
)  # fmt: skip
SQUARED: Body = [("y", "x * x")]
#: What each is made of; "a" is an argument.
CASES: dict[str, tuple[Body, Body]] = {
    WORKS: ([("t", "x * a"), ("y", "t * t")], [("y", "x * x")]),
    NAME: ([("a", "x * x"), ("y", "a * x")], [("y", "x * a")]),
    LOCAL: ([("t", "x * a"), ("y", "t * t")], [("t", "x * x"), ("y", "t * a")]),
    REDUCTION: (SQUARED, [("y", f"x / {SUM}")]),
    ELSEWHERE: (SQUARED, [("y", f"x - {MIRRORED}")]),
    ROUNDED: ([("y", "x * a")], SQUARED),
    TWICE: (SQUARED, [("y", "x * a")]),
}
N, A = 1000, 3.3


def as_text(language: str, case: str, device: torch.device) -> Callable[[], bool]:
    """Whether the pasted kernel leaves what the two leave."""
    first, second = CASES[case]
    between = torch.int32 if case == ROUNDED else torch.float32
    one = text(language, "func", first, torch.float32, between)
    two = text(language, "func", second, between, torch.float32)
    three = paste(one, text(language, "func", second, torch.float32, torch.float32))
    if language == CUDA:  # func3 stores what func2 stores
        three = [line.replace("int* out", "float* out") for line in three]
    x = torch.linspace(0.5, 2, N, device=device)

    def same() -> bool:
        want, got = ([torch.zeros_like(x, dtype=between), torch.zeros_like(x)] for _ in range(2))
        compiled(language, one, "func")(x, want[0], A)
        compiled(language, two, "func")(want[0], want[1], A)
        compiled(language, three, "func")(x, got[1], A)
        return torch.equal(got[1], want[1]) and (case != TWICE or torch.equal(got[0], want[0]))

    return same


def times(x, *, a):
    t = x * a
    return t * t


def squared(x):
    return x * x


def local_a(x):
    a = x * x
    return a * x


def by_a(x, *, a):
    return x * a


def t_again(x, *, a):
    t = x * x
    return t * a


def reduced(x):
    return x / sum(x)


def mirrored(x):
    return x - x[-1]


def kept(x, kept):
    kept = x * x
    x = kept
    return x, kept


#: The same as functions on scalars; of all elements, or of another, no scalar knows.
PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    WORKS: (times, squared), NAME: (local_a, by_a), LOCAL: (times, t_again), REDUCTION: (squared, reduced),
    ELSEWHERE: (squared, mirrored), ROUNDED: (by_a, squared), TWICE: (kept, by_a),
}  # fmt: skip


def as_rules(case: str, device: torch.device) -> Callable[[], bool]:
    """Whether composed rules leave what one after the other leaves; a list of float16 rounds."""

    def same() -> bool:
        rules = [Rule(function) for function in PARTS[case]]
        dtype = torch.float16 if case == ROUNDED else torch.float32
        want, got = ([torch.linspace(0.5, 2, N, device=device).to(dtype) for _ in range(2)] for _ in range(2))
        for rule in rules:
            multi_tensor_apply(rule, [[t] for t in want[: len(rule.inputs)]], {"a": A} if rule.scalars else {})
        one = compose(*rules)
        multi_tensor_apply(one, [[t] for t in got[: len(one.inputs)]], {"a": A} if one.scalars else {})
        return all(torch.equal(a, b) for a, b in zip(want, got, strict=True))

    return same
