"""What cannot be translated is refused where the rule is made, with the file and line it stands on."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from users_module import module

from pagedopt.rules import Rule, RuleError

# The offending line is marked with #!; everything else about each rule is fine.
REFUSED = {
    "if statement": """
        def f(param, grad, *, lr):
            if lr > 1:  #!
                param = param - grad
            return param""",
    "for loop": """
        def f(param, grad):
            grad = grad * 2
            for i in range(3):  #!
                param = param - grad
            return param""",
    "while loop": """
        def f(param):
            while param > 1:  #!
                param = param / 2
            return param""",
    "unknown call": """
        def f(param):
            param = param * 2
            param = tanh(param)  #!
            return param""",
    "returned hyperparameter that varies per element": """
        def f(param, *, scale):
            scale = scale * param  #!
            return param, scale""",
    "returned hyperparameter that varies at last": """
        def f(param, *, scale):
            scale = scale / 2
            scale = max(scale, abs(param))  #!
            param = param * scale
            return param, scale""",
    "returned hyperparameter as it was given": """
        def f(param, *, lr):
            param = param - lr
            return param, lr  #!""",
    "returned expression of a hyperparameter": """
        def f(param, *, scale):
            return param, scale / 2  #!""",
    "returned hyperparameter twice": """
        def f(param, *, scale):
            scale = scale / 2
            return param, scale, scale  #!""",
    "returned step": """
        def f(param, *, step):
            step = step + 1
            return param, step  #!""",
    "hyperparameters alone": """
        def f(param, *, lr, scale):
            lr = lr / 2
            scale = scale / 2
            return lr, scale  #!""",
    "nested function": """
        def f(param):
            def g(x):  #!
                return x
            return param""",
    "returns a local": """
        def f(param, grad):
            step = param - grad
            return param, step  #!""",
    "returns nothing": """
        def f(param):
            param = 2 * param
            return  #!""",
    "no return": """
        def f(param):
            param = 2 * param  #!""",
    "no tensors": """
        def f(*, lr):  #!
            return lr""",
    "seventeen tensors": """
        def f(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q):  #!
            return a + q""",
    "varargs": """
        def f(param, *rest):  #!
            return param""",
    "keyword varargs": """
        def f(param, **rest):  #!
            return param""",
    "positional only": """
        def f(param, /, grad):  #!
            return param""",
    "default of a tensor": """
        def f(param, grad=0):  #!
            return param""",
    "default that is no number": """
        def f(param, *, mode="fast"):  #!
            return param""",
    "local u3": """
        def f(param):
            u3 = param * 2  #!
            return u3 + param""",
    "local with an underscore": """
        def f(param):
            _x = param * 2  #!
            return _x + param""",
}
# Statements that stand alone in a rule, and ends of one.
STATEMENTS = {
    "call of a hyperparameter alone": "rate = round(lr)",
    "module function": "param = math.sqrt(param)",
    "attribute": "param = param.grad",
    "subscript": "param = param[0]",
    "string": 'param = param + "1"',
    "None": "param = None",
    "complex number": "param = param * 1j",
    "global name": "param = param * RATE",
    "function used as a value": "param = param + sqrt",
    "too many arguments": "param = sqrt(param, 2)",
    "keyword argument": "param = sqrt(x=param)",
    "three-way min": "param = min(param, grad, 1)",
    "lambda": "param = (lambda x: x)(param)",
    "walrus": "param = (y := 2) * param",
    "comprehension": "param = [param for i in 3]",
    "root as a power": "param = param ** 0.5",
    "power of an element": "param = param ** grad",
    "number to the power of an element": "param = lr ** param",
    "remainder": "param = param % 2",
    "floor division": "param = param // 2",
    "bit operator": "param = param & grad",
    "inverted bits": "param = ~param",
    "identity": "param = param if param is grad else 0",
    "membership": "param = param if param in (1, 2) else 0",
    "value of 'or'": "param = param or grad",
    "value of 'and'": "param = 2 * (param > 0 and grad)",
    "hyperparameter reassigned": "lr = lr / 2",
    "hyperparameter made an element": "lr = lr * param",
    "two targets": "param = grad = 2 * param",
    "unpacking": "param, grad = grad, param",
    "annotation": "param: float = 2 * param",
    "early return": "return param",
}
ENDS = {
    "method": "return param.sqrt()",
    "returns an expression beside a name": "return param, grad * 2",
    "returns one twice": "return param, param",
}
REFUSED |= {
    name: f"        def f(param, grad, *, lr):\n            {line}  #!\n            return param"
    for name, line in STATEMENTS.items()
}
REFUSED |= {name: f"        def f(param, grad, *, lr):\n            {line}  #!" for name, line in ENDS.items()}


def rule_from(body: str, tmp_path: Any) -> Rule:
    """The rule that ``body`` defines in a file of its own."""
    text = textwrap.dedent(body).lstrip("\n")
    own = module(f"import math\nfrom math import sqrt\nRATE = 2.0\n\n\n{text}\n", tmp_path)
    return Rule(getattr(own, re.findall(r"^def (\w+)", text, re.M)[0]))


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_translated_is_refused_by_line(body: str, tmp_path: Any) -> None:
    lines = body.strip("\n").splitlines()
    line = 6 + next(i for i, text in enumerate(lines) if text.endswith("#!"))  # five lines stand above
    with pytest.raises(RuleError, match=rf"users_module\.py:{line}: cannot translate"):
        rule_from(body, tmp_path)


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_an_indented_rule_is_refused_by_the_same_line(body: str, tmp_path: Any) -> None:
    """Rules are often written inside functions; getsource dedents them."""
    lines = body.strip("\n").splitlines()
    if lines[0].lstrip().startswith("def f"):
        inner = textwrap.indent(textwrap.dedent(body.strip("\n")), "    ")
        own = module(f"from math import sqrt\ndef make():\n{inner}\n    return f\n", tmp_path)
        line = 3 + next(i for i, text in enumerate(lines) if text.endswith("#!"))
        with pytest.raises(RuleError, match=rf":{line}: "):
            Rule(own.make())


CPP_WORDS = (  # noqa: SIM905
    "alignas alignof asm auto bitand bitor bool case catch char char16_t char32_t compl const const_cast "
    "constexpr decltype default delete do double dynamic_cast enum explicit export extern false float friend goto "
    "inline int long mutable namespace new noexcept not_eq nullptr operator or_eq private protected public "
    "register reinterpret_cast short signed sizeof static static_assert static_cast struct switch template this "
    "thread_local throw true typedef typeid typename union unsigned using virtual void volatile wchar_t xor "
    "xor_eq and_eq"
).split()
# Names the generated texts use themselves, macros of the compilers, and a Python name the loop needs.
OWN_WORDS = ["u", "u0", "u12", "out", "S", "range", "INFINITY", "NAN", "NULL", "sqrt", "max", "element_abs"]


@pytest.mark.parametrize("word", [*CPP_WORDS, *OWN_WORDS])
@pytest.mark.parametrize("place", ["tensor", "hyperparameter", "local"])
def test_reserved_names_are_refused(word: str, place: str, tmp_path: Any) -> None:
    body = {
        "tensor": f"def f(param, {word}):\n    return param",
        "hyperparameter": f"def f(param, *, {word}):\n    return param",
        "local": f"def f(param):\n    {word} = 2 * param\n    return param",
    }[place]
    with pytest.raises(RuleError, match=f"'{word}' is reserved"):
        rule_from(body, tmp_path)


def test_a_function_without_source_is_refused() -> None:
    namespace: dict[str, Callable[..., Any]] = {}
    exec("def f(param):\n    return param * 2", namespace)
    assert inspect.isfunction(namespace["f"])
    with pytest.raises(RuleError, match="source cannot be read"):
        Rule(namespace["f"])


def test_a_lambda_is_refused() -> None:
    double = lambda param: param * 2  # noqa: E731
    with pytest.raises(RuleError, match="written with def"):
        Rule(double)
