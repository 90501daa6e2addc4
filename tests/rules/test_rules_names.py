"""A rule computes what Python computes: a name that it calls stands for the function that it is translated to."""

from __future__ import annotations

import builtins
import functools
import linecache
import types
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from users_module import module

from pagedopt import PagedOptimizer, Sweep, multi_tensor_apply
from pagedopt.rules import RuleError, rule, sign

CALL = """
def {function}(x):
    return 10.0


def f(param, *, lr):
    param = param - lr * {call}
    return param
"""
CALLS = {
    "sqrt": "sqrt(param)", "exp": "exp(param)", "log": "log(param)", "abs": "abs(param)", "sign": "sign(param)",
    "min": "min(param, 1)", "max": "max(param, 1)", "fma": "fma(param, param, 1)",
}  # fmt: skip
HOME = {"sign": "pagedopt.rules", "fma": "pagedopt.rules", "sqrt": "math", "exp": "math", "log": "math"}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_of_the_users_own_is_refused(name: str, tmp_path: Path) -> None:
    own = module(CALL.format(function=name, call=CALLS[name]), tmp_path)
    advice = rf"from {HOME[name]} import {name}" if name in HOME else rf"Python's own {name}"
    said = rf"users_module\.py:7: cannot translate.*'{name}' is <function {name}.*{advice}"
    with pytest.raises(RuleError, match=said):
        rule(own.f)


@pytest.mark.parametrize("name", HOME)
def test_a_name_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    own = module(CALL.format(function="other", call=CALLS[name]), tmp_path)
    with pytest.raises(RuleError, match=rf":7: .*'{name}' is not defined; write 'from {HOME[name]} import {name}'"):
        rule(own.f)


@pytest.mark.parametrize("name", CALLS)
def test_the_known_functions_are_taken_wherever_they_are_bound(name: str, tmp_path: Path) -> None:
    text = CALL.format(function="other", call=CALLS[name])
    home = HOME.get(name, "builtins")
    at_top = module(f"from {home} import {name}\n{text}", tmp_path)
    inside = module(f"def make():\n    from {home} import {name}\n{indent(text, ' ' * 4)}    return f\n", tmp_path)
    for function in (at_top.f, inside.make()):
        made = rule(function)
        (got,) = made.reference(torch.tensor([2.0], dtype=torch.float64), lr=0.5)
        assert got.item() == pytest.approx(made(2.0, lr=0.5), rel=1e-14)


@pytest.mark.parametrize("line", ["from numpy import sqrt", "from torch import sqrt", "from math import exp as sqrt"])
def test_another_function_of_the_same_name_is_refused(line: str, tmp_path: Path) -> None:
    own = module(f"{line}\n" + CALL.format(function="other", call="sqrt(param)"), tmp_path)
    with pytest.raises(RuleError, match=r":8: .*'sqrt' is <.*from math import sqrt"):
        rule(own.f)


def test_a_hyperparameter_is_no_exception(tmp_path: Path) -> None:
    """What the host computes is translated, too."""
    own = module(CALL.format(function="sqrt", call="sqrt(lr)"), tmp_path)
    with pytest.raises(RuleError, match=":7: "):
        rule(own.f)


def test_a_closure_counts_before_the_module(tmp_path: Path) -> None:
    text = indent(CALL.format(function="other", call="sqrt(param)"), " " * 4)
    own = module(f"from math import sqrt\ndef make(sqrt):\n{text}    return f\nmath_sqrt = sqrt", tmp_path)
    rule(own.make(own.math_sqrt))
    with pytest.raises(RuleError, match=r":9: .*'sqrt' is <built-in function pow>"):
        rule(own.make(pow))


def test_a_variable_without_a_value_yet_is_refused(tmp_path: Path) -> None:
    text = indent(CALL.format(function="other", call="sqrt(param)"), " " * 4)
    own = module(f"def make(use):{text}    use(f)\n    from math import sqrt\n    use(f)", tmp_path)
    made = []

    def use(function: Callable[..., Any]) -> None:
        if not made:
            with pytest.raises(RuleError, match=r":7: .*'sqrt' is not defined"):
                rule(function)
            made.append(function)
        else:
            rule(function)

    own.make(use)
    assert made


def test_builtins_of_the_functions_own_count(tmp_path: Path) -> None:
    text = CALL.format(function="other", call="abs(param)")
    path = tmp_path / "boxed.py"
    path.write_text(text)
    for abs_of in (abs, round):
        namespace: dict[str, Any] = {"__builtins__": {**vars(builtins), "abs": abs_of}}
        exec(compile(text, str(path), "exec"), namespace)
        if abs_of is abs:
            rule(namespace["f"])
        else:
            with pytest.raises(RuleError, match="'abs' is <built-in function round>"):
                rule(namespace["f"])


# ---- bound anew after the rule was made ----


def spoil_the_module(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(own, "sign", lambda x: 10.0)


def take_from_the_module(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.delattr(own, "sign")


def hide_a_builtin(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(own, "abs", lambda x: 10.0, raising=False)


def spoil_python(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(builtins, "abs", lambda x: 10.0)


def replace_the_code(own: types.ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(own.signum.function, "__code__", own.other.__code__)


SPOIL = [spoil_the_module, take_from_the_module, hide_a_builtin, spoil_python, replace_the_code]
SIGNUM = """
import pagedopt
from pagedopt.rules import sign


@pagedopt.rule
def signum(param, grad, *, lr):
    param = param - lr * sign(grad) * abs(grad)
    return param


def other(param, grad, *, lr):
    return param
"""


@pytest.mark.parametrize("spoil", SPOIL, ids=lambda s: s.__name__)
def test_a_name_bound_anew_is_noticed_at_every_use(
    spoil: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = module(SIGNUM, tmp_path)
    signum, x, g = own.signum, torch.ones(4), torch.full((4,), -2.0)

    class Signum(PagedOptimizer):
        rule = signum

        def __init__(self, params: Any, lr: float = 0.5) -> None:
            super().__init__(params, {"lr": lr})

    param = torch.nn.Parameter(torch.ones(4))
    param.grad = g.clone()
    optimizer, sweep = Signum([param]), Sweep(signum, [[x], [g]])
    prepared = [signum.uniforms({"lr": 0.5})]
    sweep.run(prepared)
    optimizer.step()
    uses: list[Callable[[], Any]] = [
        lambda: signum.uniforms({"lr": 0.5}),
        lambda: signum.reference(x, g, lr=0.5),
        lambda: multi_tensor_apply(signum, [[x], [g]], {"lr": 0.5}),
        lambda: multi_tensor_apply(signum, [[x], [g]], {"lr": 0.5}, out=[[torch.empty(4)]]),
        lambda: sweep.run({"lr": 0.5}),
        lambda: sweep.run(prepared),
        sweep.compile,
        optimizer.step,
    ]
    with monkeypatch.context() as patch:
        spoil(own, patch)
        for use in uses:
            with pytest.raises(RuleError, match=r"users_module\.py:[68]: "):
                use()
    assert x.tolist() == param.tolist() == [2.0] * 4
    for use in uses:
        use()
    assert param.tolist() == [3.0] * 4


# ---- a function that is not what its source says ----


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(param, grad):  # type: ignore[no-untyped-def]
        return param

    return wrapper


def test_a_wrapper_is_refused() -> None:
    """inspect would hand out the source of the function inside."""

    def plain(param, grad):  # type: ignore[no-untyped-def]
        param = param - grad
        return param

    assert rule(plain)(3.0, 1.0) == 2.0
    with pytest.raises(RuleError, match=r"test_rules_names\.py:\d+: .*'plain' stands for another function"):
        rule(around(plain))
    for other in (functools.partial(plain), functools.lru_cache(plain), Holder().method, Holder, rule(plain)):
        with pytest.raises(RuleError, match="a plain function written with def"):
            rule(other)


class Holder:
    """Has a method."""

    def method(self, param):  # type: ignore[no-untyped-def]
        return param


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    text = "def f(param, grad):\n    param = param - grad\n    return param\n"
    own = module(text, tmp_path)
    for change in ("param + grad", "param - grad * 2", "param - param"):
        (tmp_path / "users_module.py").write_text(text.replace("param - grad", change))
        linecache.clearcache()
        with pytest.raises(RuleError, match=r"users_module\.py:1: .*its source is not what Python runs"):
            rule(own.f)
    (tmp_path / "users_module.py").write_text("# all gone\n")
    linecache.clearcache()
    with pytest.raises(RuleError, match=r"source cannot be read|a plain function"):
        rule(own.f)
    (tmp_path / "users_module.py").write_text(text)
    linecache.clearcache()
    assert rule(own.f)(3.0, 1.0) == 2.0


def test_how_a_rule_is_written_down_does_not_matter(tmp_path: Path) -> None:
    """Annotations, decorators, strings and line breaks are no part of what Python runs."""
    text = '''
from __future__ import annotations
from math import sqrt as _root, sqrt

def same(function): return function

def make(scale: float, abs=abs):
    @same
    @same
    def f(param: float, grad: "float" = None, *, lr: float = 0.5, nesterov: bool = False) -> tuple[float, int]:
        """Two
             lines."""
        grad = (grad
                if nesterov else
                -0.0 * abs(grad)) + 1e-3
        param = (param - lr *
                 sqrt(grad))  # a comment
        return param
    f.__defaults__ = None
    return f
'''.replace(" = None,", ",")
    made = rule(module(text, tmp_path).make(2.0))
    assert made.uniforms({"nesterov": True})[-1] == 0.5


def test_sign_of_the_rules_is_theirs() -> None:
    assert [sign(x) for x in (-3.0, 0.0, 2)] == [-1.0, 0.0, 1.0]
