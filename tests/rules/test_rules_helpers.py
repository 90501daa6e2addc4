"""Plain functions that a rule calls are written out in its kernels, by Python's own rules of names and arguments."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import F32, F64
from users_module import module

from pagedopt import multi_tensor_apply
from pagedopt.rules import Rule, RuleError, rule, sign, sqrt


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


@rule
def by_hand(param, grad, kept, *, lr, most, step):  # type: ignore[no-untyped-def]
    """The same without helpers."""
    rate = (lr + lr) / 6
    g = (grad + grad) * (rate + rate)
    k = param
    p = param - 0.5 * g
    k = k + p * 0.5**0.5
    param = k
    kept = p + -0.25
    e = grad + grad
    f = e + e
    root = sqrt(abs(f)) if param > 0 else grad - kept + (grad - kept)
    g = (root + root) * 2.0
    p = kept - lr * g
    k = kept + p * lr**0.5
    kept = k
    grad = p + step
    x = root if grad > 0 else -root
    g = (x + x) * 2.0
    p = param - 0.5 * g
    k = param + p * 0.5**0.5
    param = k * sign(p + -0.25)
    return param, kept


SCALARS = {"lr": 0.3, "most": 1.7, "step": 3.0}


def lists(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(4099, generator=generator, dtype=F64).to(dtype)] for _ in range(3)]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_the_bits_are_those_of_a_rule_written_by_hand(dtype: torch.dtype) -> None:
    found = []
    for subject in (many_helpers, by_hand):
        values = lists(dtype)
        multi_tensor_apply(subject, values, SCALARS)
        found.append(values)
    assert all(torch.equal(ours, theirs) for (ours,), (theirs,) in zip(*found, strict=True))
    assert not torch.equal(found[0][0][0], lists(dtype)[0][0])


def test_kernel_and_reference_are_what_python_computes() -> None:
    values = lists(F64)
    reference = many_helpers.reference(*(v[0] for v in values), **SCALARS)
    want = [many_helpers(*(float(v[0][i]) for v in values), **SCALARS) for i in range(50)]
    multi_tensor_apply(many_helpers, values, SCALARS)
    for i, row in enumerate(want):
        assert [float(r[i]) for r in reference] == pytest.approx(row, rel=1e-12)
        assert [float(values[j][0][i]) for j in (0, 2)] == pytest.approx(row, rel=1e-12)


def test_what_a_helper_computes_of_hyperparameters_alone_is_hoisted() -> None:
    @rule
    def subject(param, *, lr):  # type: ignore[no-untyped-def]
        low, high = bounds(lr, most=9)
        return max(low, min(param, high))

    assert subject.uniforms({"lr": 0.5}) == [-1.5, 9.0]


def bounds(x, most, least=-1):  # type: ignore[no-untyped-def]
    x = x + 1
    return least * x, most if most > x else x


def test_names_do_not_capture_each_other() -> None:
    """The rule's ``x`` is not the helper's, nor is a new name for one of these a name of the rule."""

    def helper(x, y):  # type: ignore[no-untyped-def]
        x = x * y
        y = x + y
        x = x - y
        return y - x

    @rule
    def subject(y, x, *, x_1, y_1, x_2):  # type: ignore[no-untyped-def]
        y_2 = helper(x + x_1, y * y_1) - x_2
        x = helper(y_2, x) + x * y_1
        y = helper(x, x) - y_2
        return y, x

    scalars = {"x_1": 0.7, "y_1": -1.3, "x_2": 0.4}
    a, b = torch.tensor([0.3, -0.8], dtype=F64), torch.tensor([1.1, 0.6], dtype=F64)
    want = zip(*(subject(float(p), float(q), **scalars) for p, q in zip(a, b, strict=True)), strict=True)
    multi_tensor_apply(subject, [[a], [b]], scalars)
    for got, row in zip((a, b), want, strict=True):
        assert got.tolist() == pytest.approx(row, rel=1e-14)


def test_a_branch_that_is_not_taken_is_not_computed() -> None:
    def inverse(x):  # type: ignore[no-untyped-def]
        one = 1 / x
        return one * one

    @rule
    def subject(param, *, lr):  # type: ignore[no-untyped-def]
        rate = inverse(lr) if lr != 0 and inverse(lr) > 1 else 0
        return param * rate

    assert subject.uniforms({"lr": 0.0}) == [0.0]
    assert subject.uniforms({"lr": 0.5}) == [4.0]


def test_values_change_places() -> None:
    @rule
    def subject(a, b):  # type: ignore[no-untyped-def]
        a, b = swapped(a, b)
        return a, b

    x, y = torch.tensor([1.0, 2.0]).split(1)
    multi_tensor_apply(subject, [[x], [y]], {})
    assert (x.item(), y.item()) == subject(1.0, 2.0) == (2.0, 1.0)


def test_a_single_value_overwrites_the_first_list_whatever_it_names() -> None:
    def second(a, b):  # type: ignore[no-untyped-def]
        return b

    @rule
    def subject(a, b):  # type: ignore[no-untyped-def]
        return second(a, b)

    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    assert subject.writes == (0,)
    multi_tensor_apply(subject, [[x], [y]], {})
    assert (x.item(), y.item()) == (2.0, 2.0)


def test_a_helper_of_a_closure_and_another_of_the_same_name() -> None:
    def make(helper: Callable[..., Any]) -> Rule:
        @rule
        def subject(param):  # type: ignore[no-untyped-def]
            return helper(param) * 3

        return subject

    def three(x):  # type: ignore[no-untyped-def]
        return x * 3

    thrice, double = make(three), make(twice)
    assert [thrice.reference(torch.tensor(2.0, dtype=F64))[0].item(), double(2.0)] == [18.0, 12.0]


# ---- what is refused, and where ----

REFUSED = {
    "a global of the helper": "def h(x):\n    return x * RATE  #!\n",
    "a name of the caller": "def h(x):\n    return x * grad  #!\n",
    "a statement": "def h(x):\n    if x > 0:  #!\n        x = 1\n    return x\n",
    "no return": "def h(x):\n    x = x + 1  #!\n",
    "a method": "def h(x):\n    return x.sqrt()  #!\n",
    "itself": "def h(x):\n    return h(x - 1)  #!\n",
    "each other": "def g(x):\n    return h(x)  #!\n\n\ndef h(x):\n    return g(x)\n",
    "a reserved name": "def h(x):\n    _y = x  #!\n    return _y\n",
    "any number of arguments": "def h(*x):  #!\n    return 1\n",
    "an unknown function": "def h(x):\n    return math.sinh(x)  #!\n",
    "a function of its own name": "def sqrt(x):\n    return x\n\n\ndef h(x):\n    return sqrt(x)  #!\n",
    "a power of an element": "def h(x):\n    return x**0.3  #!\n",
    "a function that comes later": "",
    "a lambda": "h = lambda x: x\n",
    "a wrapper": "@functools.wraps(abs)\ndef h(x):\n    return x\n",
    "cached": "@functools.cache\ndef h(x):\n    return x\n",
    "a class": "class h:\n    pass\n",
    "two values": "def h(x):\n    return x, x\n",
    "too few arguments": "def h(x, y):\n    return x + y\n",
    "a default that is no number": "def h(x, y=None):\n    return x\n",
    "another keyword": "def h(y):\n    return y\n",
}
RULE = "\n\ndef f(param, grad):\n    param = param - h({argument})  #?\n    return param\n"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_out_is_refused_by_line(name: str, tmp_path: Path) -> None:
    head = "import functools\nimport math\nRATE = 2.0\n\n\n"
    text = head + REFUSED[name] + RULE.format(argument="x=param" if name == "another keyword" else "param")
    mark = "#!" if "#!" in text else "#?"
    line = 1 + next(i for i, each in enumerate(text.splitlines()) if each.endswith(mark))
    with pytest.raises(RuleError, match=rf"users_module\.py:{line}: cannot translate"):
        rule(module(text, tmp_path).f)


@pytest.mark.parametrize(
    "statement",
    ["a, b, c = swapped(param, grad)", "a, b = twice(param)", "a, b = sqrt(param)", "a, b = param, grad",
     "a = swapped(param, grad)", "[a, b] = swapped(param, grad)", "a, *b = swapped(param, grad)",
     "a = twice(*param)", "a = twice(**param)"],
)  # fmt: skip
def test_values_and_names_must_be_as_many(statement: str, tmp_path: Path) -> None:
    text = (
        "from math import sqrt\ndef twice(x):\n    return x + x\ndef swapped(a, b):\n    return b, a\n"
        f"def f(param, grad):\n    {statement}\n    return param\n"
    )
    with pytest.raises(RuleError, match=r"users_module\.py:7: cannot translate"):
        rule(module(text, tmp_path).f)


# ---- changed after the rule was made ----

OWN = """
import pagedopt


def inner(x, by=1.0):
    return x + by


def outer(x):
    return inner(x) * 2


@pagedopt.rule
def subject(param):
    return outer(param)


def other(x, by=1.0):
    return x - by
"""


def rebind_outer(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(own, "outer", own.other)


def rebind_inner(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(own, "inner", own.other)


def take_inner(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.delattr(own, "inner")


def replace_inner(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(own.inner, "__code__", own.other.__code__)


def replace_a_default(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(own.inner, "__defaults__", (2.0,))


@pytest.mark.parametrize("spoil", [rebind_outer, rebind_inner, take_inner, replace_inner, replace_a_default])
def test_a_helper_that_has_changed_is_noticed(
    spoil: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = module(OWN, tmp_path)
    x = torch.tensor([1.0])
    use = functools.partial(multi_tensor_apply, own.subject, [[x]], {})
    use()
    with monkeypatch.context() as patch:
        spoil(own, patch)
        with pytest.raises(RuleError, match=r"no longer what was translated: .*users_module\.py:(5|10|15): "):
            use()
    assert x.item() == 4.0
    use()
    assert x.item() == 10.0


def test_a_file_whose_helper_has_changed_is_refused(tmp_path: Path) -> None:
    own = module(OWN.replace("@pagedopt.rule\n", ""), tmp_path)
    path = tmp_path / "users_module.py"
    path.write_text(path.read_text().replace("x + by", "x * by"))
    with pytest.raises(RuleError, match=r"users_module\.py:5: .*its source is not what Python runs"):
        rule(own.subject)


def test_defaults_keep_their_sign_and_size() -> None:
    def signed(x, low=-2.0, zero=-0.0, most=math.inf):  # type: ignore[no-untyped-def]
        return low**2 * min(x, most) + math_copy(zero)

    def math_copy(x):  # type: ignore[no-untyped-def]
        return 1 / (x + 1)

    @rule
    def subject(param):  # type: ignore[no-untyped-def]
        return signed(param)

    x = torch.tensor([3.0], dtype=F64)
    assert subject.reference(x)[0].item() == subject(3.0) == 13.0
    multi_tensor_apply(subject, [[x]], {})
    assert x.item() == 13.0
