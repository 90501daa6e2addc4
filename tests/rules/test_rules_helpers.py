"""What Python runs while a rule is traced, as Python computes it: functions, loops, tuples, closures, other rules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rules_under_test import functions as every_function
from rules_under_test import functions_in_torch
from support import F64
from users_module import module

from pagedopt import multi_tensor_apply
from pagedopt.rules import RULES, Rule, rule, sign, sqrt


def twice(x):  # type: ignore[no-untyped-def]
    return x + x


def swapped(a, b):  # type: ignore[no-untyped-def]
    return b, a


def mixed(param, grad, rate=0.5, *, scale=2.0, bias=-0.25):  # type: ignore[no-untyped-def]
    """Its own names are those of its callers, too; it assigns its parameters, and calls another."""
    grad = twice(grad) * scale
    kept = param
    param = param - rate * grad
    rate = rate**0.5
    kept += param * rate
    return kept, param + bias


def mixed_one(grad, param):  # type: ignore[no-untyped-def]
    first, second = mixed(param, grad)
    return first * sign(second)


@rule
def many_helpers(param, grad, kept, *, lr, most, step):  # type: ignore[no-untyped-def]
    """Calls of every kind: of elements, of hyperparameters, of both, nested, in tuples, in branches."""
    rate = twice(lr) / twice(1 + 2)
    param, kept = mixed(param, grad, scale=twice(rate))
    grad, param = swapped(param, grad)
    grad, param = swapped(param, grad)
    root = sqrt(abs(twice(twice(grad)))) if param > 0 else twice(grad - kept)
    kept, grad = mixed(kept, root, lr, bias=step)
    param = mixed_one(param=param, grad=root if grad > 0 else -root)
    return param, kept


SCALARS = {"lr": 0.3, "most": 1.7, "step": 3.0}


def lists(count: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(4099, generator=generator, dtype=F64)] for _ in range(count)]


# ---- what Python can do, in rules that are compared with Python ----

RATES = (0.5, 0.25, 2.0)
TABLE = {"fast": 3, "slow": 0.125}


class Pair(NamedTuple):
    low: Any
    high: Any

    def inside(self, x):  # type: ignore[no-untyped-def]
        return self.low if x < self.low else min(x, self.high)


@rule
def loops(a, b, *, lr):  # type: ignore[no-untyped-def]
    """Loops, tuples, lists, dicts, a module's constants, comprehensions, walrus, starred arguments."""
    parts = []
    for i, rate in enumerate(RATES):
        parts.append(a * rate if i % 2 else -a * (rate * lr))
    total = sum(parts) + sum(x * x for x in parts[1:])
    first, *rest = [total, b, (c := TABLE["fast"])]
    while c > 1:
        c -= 1
        first = first + TABLE["slow"] / c
    (a, b), last = swapped(*rest[:1], first), math.pi
    a += last
    return a, b


@rule
def functions(a, b, *, lr, x, u, S, double, _y, element_max, near=0.5):  # type: ignore[no-untyped-def]
    """Functions inside, methods, lambdas; names that C++, Python's builtins and the kernel have."""

    def inner(x, power=2):  # type: ignore[no-untyped-def]
        return x**power if x > lr or not x else near * x

    def turned(f):  # type: ignore[no-untyped-def]
        return lambda *args: -f(*args)

    u0 = Pair(-near, near * 3).inside(a)
    max_ = turned(inner)(b, 3) + inner(u0) + (lambda x: x if lr > 1 else 2 * x)(a)
    out, _i, new, len = u * S, double - _y, x / element_max, a * 0.5
    a = max_ + out * b + max(u0, _i, len) - new * _y
    return a


@rule
def truths(a, b, *, lr):  # type: ignore[no-untyped-def]
    """'and', 'or', 'not' and chains: lazy for Python's values, of which they give the value."""
    name = RATES[3:] or "b"
    known = {"b": b}[name] if name and not isinstance(name, int) else 1 / 0
    some = 1 if (not name and 1 / 0) or 2 < len(name) < 1 / 0 else known
    b = some if (0 < 1 and a < b < 2 <= 5 * lr) or not (lr and a) else -some if a != b or lr > 2 else 0
    a = (a > b) + (b > 0) * 2 - (lr > 1) * 4 if name is not None and name in ("a", "b") else a
    return a, b


@rule
def rules_inside(a, b, c, d, *, lr, step):  # type: ignore[no-untyped-def]
    """Other rules, with their defaults."""
    a, c, d = RULES["adamw"](a, b, c, abs(d), lr=lr, beta1=0.9, beta2=0.75, eps=1e-3, weight_decay=lr / 2, step=step)
    a = RULES["lerp"](a, RULES["square_root"](d), weight=lr) + math.tanh(c)
    return a, c, d


FUNCTIONS = {"x": 0.5, "u": 2.0, "S": 3.0, "double": -1.0, "_y": 1.5, "element_max": 7.0}
SUBJECTS: list[tuple[Rule, dict[str, float]]] = [
    (loops, {"lr": 0.3}), (functions, {"lr": 0.3, **FUNCTIONS}), (functions, {"lr": 1.7, **FUNCTIONS}),
    (truths, {"lr": 0.6}), (truths, {"lr": 0.0}), (truths, {"lr": 3.0}), (rules_inside, {"lr": 0.3, "step": 2}),
    (many_helpers, SCALARS),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "scalars"), SUBJECTS, ids=lambda x: getattr(x, "name", None))
def test_kernel_and_reference_are_what_python_computes(subject: Rule, scalars: dict[str, float]) -> None:
    values = lists(len(subject.inputs))
    reference = subject.reference(*(v[0] for v in values), **scalars)
    want = [subject(*(float(v[0][i]) for v in values), **scalars) for i in range(50)]
    multi_tensor_apply(subject, values, scalars)
    for i, row in enumerate(want):
        row = row if isinstance(row, tuple) else (row,)
        assert [float(r[i]) for r in reference] == pytest.approx(row, rel=1e-12)
        assert [float(values[j][0][i]) for j in subject.writes] == pytest.approx(row, rel=1e-12)


def test_what_a_helper_computes_of_hyperparameters_alone_is_hoisted() -> None:
    def bounds(x, most, least=-1):  # type: ignore[no-untyped-def]
        x = x + 1
        return least * x, most if most > x else x

    @rule
    def subject(param, *, lr):  # type: ignore[no-untyped-def]
        low, high = bounds(lr, most=9)
        return max(low, min(param, high))

    assert subject.uniforms({"lr": 0.5}) == [9.0, -1.5]


RETURNED = {
    "return param - lr * grad, m": ((0, 2), {"param": 3 - 0.5 * 7}),
    "return param - lr * grad, 2 * m + grad": ((0, 2), {"param": 3 - 0.5 * 7, "m": 2 * 5 + 7}),
    "new = param - lr * grad; grad = 2 * grad; return new, grad + 1": ((0, 2), {"param": 3 - 0.5 * 7, "m": 2 * 7 + 1}),
    "m = m + grad; param = param - m; return m, param": ((2, 0), {"param": 3 - 12, "m": 12}),
    "m = m + 1; return m": ((2,), {"m": 6}),
    "return param - lr * m": ((0,), {"param": 3 - 0.5 * 5}),
}


@pytest.mark.parametrize("body", RETURNED)
def test_what_is_returned_is_of_names_in_any_order_or_else_of_outputs_by_position(body: str, tmp_path: Path) -> None:
    writes, want = RETURNED[body]
    made = rule(module(f"def f(param, grad, m, *, lr):\n    {body}\n", tmp_path).f)
    given = {"param": 3.0, "grad": 7.0, "m": 5.0}
    lists = [[torch.tensor([value])] for value in given.values()]
    multi_tensor_apply(made, lists, {"lr": 0.5})
    assert made.writes == writes
    assert [own[0].item() for own in lists] == [*(given | want).values()]


def test_without_a_gradient_all_inputs_are_outputs() -> None:
    @rule
    def turned(x, y):  # type: ignore[no-untyped-def]
        return 1 * y, -x

    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    multi_tensor_apply(turned, [[x], [y]], {})
    assert (x.item(), y.item()) == (2.0, -1.0)


def test_a_rule_may_be_called_with_float64_tensors() -> None:
    x = torch.tensor([0.25, 1.0, 3.0], dtype=F64)
    want = functions_in_torch(x)
    for got, value in zip(every_function(x, *[None] * 6), want, strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=0)
    assert [*sign(x - 1)] == [-1, 0, 1]
    for i, number in enumerate(x.tolist()):
        assert every_function(number, *[None] * 6) == pytest.approx([value[i].item() for value in want], rel=1e-15)


def test_a_single_value_overwrites_the_first_list_whatever_it_names() -> None:
    @rule
    def subject(a, b):  # type: ignore[no-untyped-def]
        return swapped(a, b)[0]

    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    assert subject.writes == (0,)
    multi_tensor_apply(subject, [[x], [y]], {})
    assert (x.item(), y.item()) == (2.0, 2.0)


# ---- branches ----


def test_what_is_computed_only_in_a_branch_is_computed_only_there() -> None:
    def inverse(x):  # type: ignore[no-untyped-def]
        one = 1 / x
        return one * one + one

    @rule
    def subject(param, *, lr, step):  # type: ignore[no-untyped-def]
        rate = inverse(lr) if lr != 0 and inverse(lr) > 1 else 0
        other = inverse(lr) if step > 1 and lr != 0 else 7
        both = (inverse(lr) if lr > 0 else 3) if step > 1 else 1 / step
        param = param * inverse(lr) if lr != 0 else param * 1.0
        inner = param if param > 0 else 2 * param if step != 1 else math.log(step - 1) * param
        return inner + rate * other - both

    for lr, step in ((0.0, 3.0), (0.5, 3.0), (0.5, 2.0), (0.0, 2.0), (-0.5, 2.0)):
        x = torch.linspace(-2, 2, 9, dtype=F64)
        want = [subject(float(v), lr=lr, step=step) for v in x]
        (reference,) = subject.reference(x, lr=lr, step=step)
        multi_tensor_apply(subject, [[x]], {"lr": lr, "step": step})
        assert x.tolist() == pytest.approx(want, rel=1e-14)
        assert reference.tolist() == pytest.approx(want, rel=1e-14)


def test_an_error_of_numbers_is_raised_where_the_branch_is_taken() -> None:
    @rule
    def subject(param, *, lr):  # type: ignore[no-untyped-def]
        return param * (math.log(-1) if lr else 1 / 1)

    assert subject.uniforms({"lr": 0.0}) == [1.0]
    with pytest.raises(ValueError, match="math domain error"):
        subject.uniforms({"lr": 1.0})


def test_constants_keep_their_sign_and_size() -> None:
    @rule
    def subject(param, other, *, a):  # type: ignore[no-untyped-def]
        low = (-2) ** a + -0.0 * a - min(a, math.inf)
        param = low * min(param, math.inf) + max(other, -math.inf)
        other = math.nan if param > 1 else -0.0
        return param, other

    x, y = torch.tensor([3.0, 0.0], dtype=F64), torch.tensor([-1.0, -1.0], dtype=F64)
    assert subject(3.0, -1.0, a=2.0)[0] == 5.0
    multi_tensor_apply(subject, [[x], [y]], {"a": 2.0})
    assert (x.tolist(), y.isnan().tolist(), y.signbit().tolist()[1]) == ([5.0, -1.0], [True, False], True)


# ---- the text ----


def test_doublings_are_printed_as_statements() -> None:
    @rule
    def subject(a, *, lr):  # type: ignore[no-untyped-def]
        for _ in range(30):
            lr = lr + lr * lr
            a = a + a * a
        return a * lr

    for text in (subject.cuda_source(), subject.prologue_source(), subject.numba_source()):
        assert text.count("\n") > 30
        assert len(text) < 6000
    assert subject.uniforms({"lr": 1e-9}) == [pytest.approx(1e-9, rel=1e-6)]


def test_deep_expressions_are_printed_as_statements(tmp_path: Path) -> None:
    text = f"def f(x, *, lr):\n    return {' + '.join(f'x * {i} + lr**{i}' for i in range(120))}\n"
    made = rule(module(text, tmp_path).f)
    x = torch.tensor([0.5], dtype=F64)
    multi_tensor_apply(made, [[x]], {"lr": 0.5})
    assert x.item() == pytest.approx(120 * 119 / 4 + 2)
    assert max(line.count("(") for line in made.cuda_source().splitlines()) < 100


def test_branches_that_may_raise_are_printed_in_as_many_statements_as_they_have() -> None:
    """The same division in many branches: each is decided by the tests before it, and none is written out again."""

    def chain(turns: int) -> Rule:
        @rule
        def chained(param, grad, *, lr, b):  # type: ignore[no-untyped-def]
            x = 1.0
            for i in range(turns):
                x = 1 / x if x > i else x + lr if b > i else 1 / lr
            return param * x

        return chained

    def by_hand(turns: int, lr: float, b: float) -> float:
        x = 1.0
        for i in range(turns):
            x = 1 / x if x > i else x + lr if b > i else 1 / lr
        return x

    for turns in (2, 5, 30):
        for lr, b in ((0.1, 3.0), (2.0, 0.5), (0.001, 40.0)):
            assert chain(turns).uniforms({"lr": lr, "b": b}) == [by_hand(turns, lr, b)]
    sizes = [len(chain(turns).prologue_source()) for turns in (20, 40)]
    assert sizes[1] < 2.5 * sizes[0]


def test_what_one_branch_may_not_compute_another_does() -> None:
    @rule
    def twice(param, grad, *, a, b):  # type: ignore[no-untyped-def]
        first = 1 / a if b > 0 else b
        second = 1 / a if first < 0 else 2 / a if b > 1 else a
        return param * first + grad * second

    for a, b in ((2.0, 3.0), (2.0, 0.5), (2.0, -1.0), (0.0, 0.0)):
        first = 1 / a if b > 0 else b
        second = 1 / a if first < 0 else 2 / a if b > 1 else a
        assert sorted(twice.uniforms({"a": a, "b": b})) == sorted([first, second])
    with pytest.raises(ZeroDivisionError):
        twice.uniforms({"a": 0.0, "b": -1.0})
