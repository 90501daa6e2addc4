"""What a refusal says to write instead: the statement is quoted, and the advice, followed, makes a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_rules_refused import rule_from

import pagedopt
from pagedopt import RuleError, multi_tensor_apply
from pagedopt.launch.sweep import Sweep
from pagedopt.rules import RULES

HEAD = "def f(param, grad, *, lr):\n    "
#: A body, and what the message says of it.
ADVICE = {
    "if": ("if lr > 1:\n        param = grad\n    return param", "'if lr > 1:': .*a if test else b"),
    "if at the end": (
        "if lr > 1:\n        return param\n    else:\n        return grad",
        "'if lr > 1:'; .*a if test else b",
    ),
    "for": ("for i in range(3):\n        param = param - grad\n    return param", "'for i in range.3.:': .*no loops"),
    "early return": ("return param\n    return grad", "'return param': .*comes last"),
    "no return": ("param = grad", "ends with 'return' .* not with 'param = grad'$"),
    "nothing returned": ("param = grad\n    return", "ends with 'return' of the new values, and not with 'return'$"),
    "annotation": ("param: float = 2 * grad\n    return param", "write 'param = 2 . grad'"),
    "chain": ("param = x = 2 * grad\n    return param", "write 'x = 2 . grad', then 'param = x'"),
    "bare call": ("print(param)\n    return param", r"'print\(param\)': .*leave it out"),
    "function": ("def g(x):\n        return x\n    return param", r"'def g\(x\):': define the function outside"),
    "pass": ("pass\n    return param", "'pass': only 'name = expression'"),
    "math.sqrt": ("return math.sqrt(grad)", r"math.sqrt\(grad\)'; write 'from math import sqrt' and call sqrt\(grad\)"),
    "of a hyperparameter": ("return param - math.sqrt(lr)", r"from math import sqrt' and call sqrt\(lr\)"),
    "torch.sqrt": ("return torch.sqrt(grad)", r"write 'from math import sqrt' and call sqrt\(grad\)"),
    "method": ("return (grad * 2).sqrt()", r"call sqrt\(grad \* 2\)"),
    "math.fabs": ("return math.fabs(grad)", r"write Python's own abs: abs\(grad\)"),
    "math.tanh": ("return math.tanh(grad)", r"'math.tanh\(grad\)'; .*sqrt/1, abs/1"),
    "too many arguments": ("return sqrt(grad, 2)", r"'sqrt\(grad, 2\)'; .*sqrt/1, abs/1"),
    "root": ("return param - grad ** 0.5", r"'grad \*\* 0.5'; .*or write sqrt\(grad\), with 'from math import sqrt'"),
    "power": ("return param - grad ** 0.3", r"'grad \*\* 0.3'; .*sqrt, exp and log"),
    "remainder": ("return param % 2", "or the powers 2 and 3$"),
    "constant": ("return param - RATE * grad", r"'RATE' .*keyword with a default: \(\*, RATE=2.0\)"),
    "unknown name": ("return param - RITE * grad", "'RITE' is not a parameter or an earlier assignment of the rule$"),
    "attribute": ("return param * math.pi", r"'math.pi': .*\(\*, pi=…\)"),
    "expression beside a name": ("return param - lr * grad, grad", "returns 'param - lr . grad'; .*assigned before"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_a_refusal_quotes_and_says_what_to_write(name: str, tmp_path: Path) -> None:
    body, text = ADVICE[name]
    with pytest.raises(RuleError, match=text):
        rule_from(HEAD + body, tmp_path)


@pytest.mark.parametrize(
    "body",
    ["param = grad if lr > 1 else param\n    return param", "x = 2 * grad\n    param = x\n    return param",
     "return sqrt(grad)", "return param - sqrt(lr)", "return abs(grad)"],
)  # fmt: skip
def test_advice_that_is_followed_makes_a_rule(body: str, tmp_path: Path) -> None:
    assert rule_from(HEAD + body, tmp_path).name == "f"


def test_a_function_that_a_rule_calls_gets_parameters() -> None:
    with pytest.raises(RuleError, match=r"'SCALE' .* of the function; make it a parameter with a default: SCALE=0.5"):

        @pagedopt.rule
        def f(param):  # type: ignore[no-untyped-def]
            return scaled(param)


SCALE = 0.5


def scaled(x):  # type: ignore[no-untyped-def]
    return SCALE * x


# ---- where a rule is used ----


def undecorated(param: float, grad: float, *, lr: float) -> float:
    return param - lr * grad


@pagedopt.rule
def descent(param, grad, *, lr):  # type: ignore[no-untyped-def]
    rate = 2 * lr
    return param - 1 / rate * grad


@pagedopt.rule
def starless(param, grad, lr):  # type: ignore[no-untyped-def]
    return param - lr * grad


def lists() -> list[list[torch.Tensor]]:
    return [[torch.ones(3)], [torch.ones(3)]]


@pytest.mark.parametrize("out", [None, [[torch.ones(3)]]], ids=["in place", "out"])
def test_a_function_that_is_no_rule_is_to_be_decorated(out: Any) -> None:
    given: Any = undecorated
    with pytest.raises(TypeError, match=r"rule is the function 'undecorated'; .*decorated with pagedopt.rule"):
        multi_tensor_apply(given, lists(), {"lr": 0.1}, out=out)
    with pytest.raises(TypeError, match=r"decorated with pagedopt.rule"):
        Sweep(given, lists())
    given = 3
    with pytest.raises(TypeError, match="rule is 3; "):
        multi_tensor_apply(given, lists())


def test_a_hyperparameter_before_the_star_is_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"unknown \['lr'\]: in rule 'starless' 'lr' stands before the '\*'"):
        multi_tensor_apply(starless, lists(), {"lr": 0.1})


@pytest.mark.parametrize("value", ["a", "1", "", None, 1j, [0.1], torch.ones(2)], ids=repr)
def test_a_scalar_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"rule 'descent': the scalar 'lr' is .*; give a number"):
        multi_tensor_apply(descent, lists(), {"lr": value})


@pytest.mark.parametrize("value", [1, True, np.float32(0.5), torch.tensor(0.5), torch.ones(1)], ids=repr)
def test_a_number_is_taken_as_it_was(value: Any) -> None:
    assert descent.uniforms({"lr": value}) == [1 / (2 * float(value))]


def test_a_division_by_zero_is_named_with_its_expression() -> None:
    with pytest.raises(ZeroDivisionError, match=r"rule 'descent': .*division by zero in '1 / rate'; lr=0"):
        multi_tensor_apply(descent, lists(), {"lr": 0.0})
    with pytest.raises(ZeroDivisionError, match=r"rule 'descent': .*division by zero in '1 / rate'; lr=0"):
        descent.uniform_sets({"lr": np.array([1.0, 0.0] * 9)})


def test_a_number_that_is_too_large_is_named_with_its_expression() -> None:
    with pytest.raises(OverflowError, match="int too large to convert to float"):
        RULES["add_scalar"].uniforms({"scalar": 10**400})
    adamw = RULES["adamw"]
    scalars = {name: 0.5 for name in adamw.scalars if name not in adamw.defaults}
    with pytest.raises(OverflowError, match=r"rule 'adamw': .* in '1 - beta1 \*\* step'; .*step=100000"):
        adamw.uniforms({**scalars, "beta1": 2.0, "step": 100_000})
