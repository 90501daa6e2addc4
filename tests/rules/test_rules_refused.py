"""What cannot be traced is refused with its file and line, a caret, the reason, and what to write instead."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from users_module import module

from pagedopt.rules import Rule, RuleError, rule

#: Above every rule below.
HEAD = """\
import functools
import math
import random
import time
import numpy
import torch
from math import sqrt
TENSOR = torch.ones(3)
GENERATOR = numpy.random.default_rng(3)
SEEDED = torch.Generator()


def drawn_from_its_own():
    return GENERATOR.random()


def clock():
    return time.perf_counter()


def drawn():
    return sum(drawn_from(random) for _ in range(3))


def drawn_from(source):
    return source.random()


def fails():
    raise ValueError("first line" + 30 * "\\nanother")


def again(x):
    return again(x - 1)


def wrong(x):
    return x.sqrt()


short = lambda x: x


def two(x):
    return x, x


def first(x):
    yield x


"""
REDUCED = "sees one element of each tensor.* no '(norm|mean|max|sum)'; .*foreach_norm.* hyperparameter"
DRAWN = "which gives another number each time; .*give it as a hyperparameter"
TRUTH = "asks whether a value is true.*write 'name = a if test else b'"
#: Statements that stand alone in a rule: what is refused, what the caret marks, what is said.
STATEMENTS = {
    "if lr > 1: param = grad": ("if lr > 1: param = grad", TRUTH),
    "param = sorted([param, grad])[0]": ("sorted([param, grad])", TRUTH),
    "param = list(map(lambda x: x if lr else 0, [bool(param)]))[0]": ("bool(param)", TRUTH),
    "for x in param: param = x": ("for x in param: param = x", "one element of each tensor.* there is nothing inside"),
    "param = param[0]": ("param[0]", "one element of each tensor.* there is nothing inside"),
    "param = param / grad.norm()": ("grad.norm", REDUCED),
    "param = param / torch.linalg.norm(grad)": ("torch.linalg.norm(grad)", REDUCED),
    "param = param / numpy.sum(grad)": ("numpy.sum(grad)", REDUCED),
    "param = param / grad.shape[0]": ("grad.shape", "sees one element of each tensor.* no 'shape'"),
    "param = torch.nn.functional.relu(param)": ("torch.nn.functional.relu(param)", "call of 'relu'"),
    "param = fails() * param": ("fails()", "ValueError: first line\n"),
    "param = param * random.random()": ("random.random()", DRAWN),
    "param = param * GENERATOR.choice([1, -1])": ("GENERATOR.choice([1, -1])", DRAWN),
    "param = param * numpy.random.randn()": ("numpy.random.randn()", DRAWN),
    "param = param * torch.rand(()).item()": ("torch.rand(())", DRAWN),
    "param = param * torch.rand((), generator=SEEDED).item()": ("torch.rand((), generator=SEEDED)", DRAWN),
    "param = param * drawn()": ("drawn()", DRAWN),
    "param = param * drawn_from_its_own()": ("drawn_from_its_own()", DRAWN),
    "param = param * clock()": ("clock()", DRAWN),
    "param = math.sinh(param)": ("math.sinh(param)", "call of 'sinh'; .*plain functions.* sqrt/1, .*fma/3"),
    "param = math.log(param, 2)": ("math.log(param, 2)", "call of 'log'; .* log/1"),
    "param = sqrt(x=param)": ("sqrt(x=param)", "call of 'sqrt'; .*sqrt/1"),
    "param = torch.sqrt(param)": ("torch.sqrt(param)", r"write 'from pagedopt.rules import sqrt' and call sqrt\("),
    "param = math.fabs(param)": ("math.fabs(param)", r"write Python's own abs and call abs\("),
    "param = (grad * 2).sqrt()": ("(grad * 2).sqrt", r"no 'sqrt'; call sqrt\("),
    "param = param.grad": ("param.grad", "numbers: these have no 'grad'"),
    "param = float(param)": ("float(param)", r"leave float\(\), .* out: hyperparameters are floats"),
    "param = param * int(lr)": ("int(lr)", r"leave .*int\(\) .*out"),
    "param = isinstance(lr, float) * param": ("isinstance(lr, float)", "call of 'isinstance'"),
    'param = len(f"{lr:.3}") * param': ('f"{lr:.3}"', "has no text while"),
    "param = param + '1'": ("param + '1'", "'1' where a number is needed"),
    "param = param * None": ("param * None", "None where a number is needed"),
    "param = param + sqrt": ("param + sqrt", "a builtin_function_or_method where a number is needed"),
    "param = param * TENSOR": ("param * TENSOR", r"a Tensor where .* is an argument of the rule, .* take .item\(\)"),
    "param = TENSOR * param": ("TENSOR * param", "a Tensor where a number is needed"),
    "param = 10**400 * param": ("10**400 * param", "an int that is too large for a float"),
    "param = param + RITE": ("RITE", "NameError: name 'RITE' is not defined"),
    "param = 1 / 0 * param": ("1 / 0", "ZeroDivisionError: division by zero"),
    "param = param ** 0.5": (
        "param ** 0.5",
        r"'\*\*' of elements; use .* powers 2 and 3, or 'from pagedopt.rules import sqrt",
    ),
    "param = lr ** param": ("lr ** param", r"'\*\*' of elements"),
    "param = param % 2": ("param % 2", r"'%' of elements; use \+ - \* / or the powers 2 and 3"),
    "param = param & grad": ("param & grad", "no bits; use"),
    "param = ~param": ("~param", "no bits; use"),
    "param = 1 if param is grad else 0": ("param is grad", "'is' of a value, .*compare it with =="),
    "param = 1 if 2 in (1, param) else 0": ("2 in (1, param)", "'in' of a value"),
    "param = param or grad": ("param or grad", "the value of 'or', .*write 'a if test else b'"),
    "param = grad if lr > 0 else (y := 2)": ("y := 2", "':=' in a branch; write 'y = …' before"),
    "param, grad = (param, lr) if lr else (lr, param)": (
        "(param, lr) if lr else (lr, param)",
        "a tuple where .*; a branch is one number: choose each by itself",
    ),
    "param = again(param)": ("again(x - 1)", "'again' calls itself, directly or through others"),
    "param = wrong(param)": ("x.sqrt", r"no 'sqrt'; call sqrt\(…\) \(called by line \d+ of the rule 'f'\)"),
    "param = short(param)": ("short(param)", "'<lambda>' is no function that can be traced"),
    "param = two(param, 1)": ("two(param, 1)", r"TypeError: two\(\) takes 1 positional argument but 2"),
    "a, b = two(two(param)[0])[:1]": ("a, b", "not enough values to unpack"),
    "param = functools.partial(max)([param, grad])": ("functools.partial(max)([param, grad])", TRUTH),
    "param = first(param)": ("yield x", "runs once, to be traced"),
    "with param: pass": ("with param: pass", "runs once, to be traced"),
    "try: param = float(lr)\n    except TypeError: param = 0": (
        "try: param = float(lr)",
        "runs once, to be traced",
    ),
    "return param": ("return param", "one 'return', which comes last; .*'a if test else b'"),
    "for i in range(10**9): grad = param + i % 7": ("param + i % 7", "more than 10000 operations"),
    "for i in range(9999): grad = grad * 2 + 1": ("grad * 2", "more than 10000 operations"),
}
RULE = "def f(param, grad, *, lr, scale=1.0):\n    {}\n    return param\n"
REFUSED = {statement: (RULE.format(statement), mark, text) for statement, (mark, text) in STATEMENTS.items()}
#: The last line of a rule whose first is another statement.
ENDS = {
    "return param, grad * 2": ("grad * 2", r"2 values; .* position \('param'\), or .* by name .*'grad = grad . 2'"),
    "return param, TENSOR": ("TENSOR", "returns 2 values; give one for each output"),
    "return param, param": ("param", "returns 'param' twice; leave one out"),
    "return param, lr": ("lr", "returns 'lr', a hyperparameter that it does not change"),
    "lr = lr / 2\n    scale = 2\n    return lr, scale": ("return lr, scale", "returns no tensor"),
    "return two(param)": ("return two(param)", "returns 2 values; assign them to parameters, and return these by name"),
    "both = two(param)\n    return both": ("return both", "returns 2 values; assign them"),
    "param = two(param)\n    return param": ("return param", "returns 2 values for one parameter"),
    "param = None\n    return param": ("return param", "None where a number is needed"),
    "param = grad\n    return": ("return", "ends with 'return' of the new values, not with 'return'"),
    "param = 2 * grad": ("param = 2 * grad", "ends with 'return' of the new values, not with 'param = 2 . grad'"),
    "if lr > 1:\n        return param": ("return param", "one 'return', which comes last"),
    "lr = lr * param\n    return param, lr": ("return param, lr", "'lr' is one number for all elements; .*tensor's"),
}  # fmt: skip
REFUSED |= {
    body: (f"def f(param, grad, *, lr, scale=1.0):\n    {body}\n", mark, text) for body, (mark, text) in ENDS.items()
}
REFUSED |= {
    body: (f"def f{body}:\n    return a\n", f"def f{body}:", text)
    for body, text in [
        ("(*, lr)", "at least one, are plain"), ("(a, *rest)", "plain positional"), ("(a, **rest)", "plain positional"),
        ("(a, /, b)", "plain positional"), ("(a, b=0)", "plain positional"),
        ("(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q)", "17 tensor parameters; there may be 16"),
    ]
}  # fmt: skip
#: What is returned of (param, grad, m, v), by position.
POSITIONS = {
    "return param - lr * grad, v": ("param - lr * grad", r"2 values; .* by position \('param', 'm', 'v'\)"),
    "return param - lr * grad, v, m": ("v", "returns 'v' in the place of 'm'; .*: write 'm = …'"),
    "return param - lr * grad, grad, v": ("grad", "returns 'grad' in the place of 'm'"),
    "return param, *two(m)": ("*two(m)", "returns 2 values"),
}
REFUSED |= {
    body: (f"def f(param, grad, m, v, *, lr):\n    {body}\n", mark, text) for body, (mark, text) in POSITIONS.items()
}
REFUSED["step"] = ("def f(a, *, step):\n    return a, step\n", "step", "'step', which the optimizer counts")
REFUSED["mode"] = ("def f(a, *, mode='fast'):\n    return a\n", "mode", "the default of 'mode' is 'fast', not a number")


#: What the caret marks from Python 3.12 on, whose code knows the places of a test and of a replacement field.
SINCE_312 = {
    "if lr > 1: param = grad": "lr > 1",
    'f"{lr:.3}"': "{lr:.3}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_line_caret_reason_and_advice(name: str, tmp_path: Path) -> None:
    text, mark, said = REFUSED[name]
    whole, begin = HEAD + text, HEAD.count("\n")
    lines = whole.splitlines()
    at = next(i for i in (*range(begin + 1, len(lines)), *range(begin + 1)) if mark in lines[i])
    with pytest.raises(
        RuleError, match=rf"(?s)^\S*users_module\.py:{at + 1}: cannot translate this rule: .*{said}"
    ) as e:
        traced(rule(module(whole, tmp_path).f))
    assert chain_of(e.value) == [e.value]
    _, line, caret = str(e.value).splitlines()
    assert line.strip() == lines[at].strip()
    marked = line[caret.index("^") : caret.rindex("^") + 1]
    assert marked == (SINCE_312.get(mark, mark) if sys.version_info >= (3, 12) else mark)


def chain_of(error: BaseException) -> list[BaseException]:
    """The exceptions that a traceback shows."""
    inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return [error, *(chain_of(inner) if inner else [])]


def traced(subject: Rule) -> Rule:
    """It raises what is wrong with its values."""
    assert subject.program
    return subject


def test_syntax_is_refused_by_the_decorator_and_values_at_first_use(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="one 'return'"):
        rule(module(HEAD + RULE.format("return grad"), tmp_path).f)
    made = rule(module(HEAD + RULE.format("param = param[0]"), tmp_path).f)
    for use in (made.cuda_source, made.prologue_source, made.numba_source, lambda: made.uniforms({"lr": 1.0})):
        with pytest.raises(RuleError, match="nothing inside") as e:
            use()
        assert chain_of(e.value) == [e.value]


def test_an_indented_rule_is_refused_by_the_same_line(tmp_path: Path) -> None:
    """Rules are often written inside functions; letters may take several bytes."""
    text = "def make():\n    def f(param, *, β):\n        param = β * 'ä' * param\n        return param\n    return f\n"
    with pytest.raises(RuleError, match=r":3: .*\n    param = β \* 'ä' \* param\n            \^{7}$"):
        traced(rule(module(text, tmp_path).make()))


@pytest.mark.parametrize("text", ["'%s' % param", "f'{[param]}'", "{param: 1}.get(grad)"])
def test_what_python_makes_of_a_value_is_no_number(text: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="where a number is needed"):
        traced(rule(module(RULE.format(f"param = {text}"), tmp_path).f))


def test_advice_that_is_followed_makes_a_rule(tmp_path: Path) -> None:
    for line in ("param = grad if lr > 1 else param", "param = abs(sqrt(grad))", "grad = grad * 2; param = grad"):
        assert traced(rule(module(HEAD + RULE.format(line), tmp_path).f)).writes == (0,)


def test_a_value_of_another_rule_is_refused(tmp_path: Path) -> None:
    text = "kept = []\ndef f(a):\n    kept.append(a)\n    return a * kept[0]\ndef g(b):\n    return b * kept[0]\n"
    own = module(text, tmp_path)
    traced(rule(own.f))
    with pytest.raises(RuleError, match=r":6: .*a value of another rule, or of an earlier trace"):
        traced(rule(own.g))


def test_what_has_no_source_is_refused() -> None:
    namespace: dict[str, Any] = {}
    exec("def f(param):\n    return param * 2", namespace)
    with pytest.raises(RuleError, match="source cannot be read"):
        rule(namespace["f"])
    for other in (functools.partial(rule), len, Path, lambda param: param * 2):
        with pytest.raises(RuleError, match="plain function written with def"):
            rule(other)
