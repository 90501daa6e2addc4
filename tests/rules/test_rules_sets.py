"""Many sets of hyperparameters at once: the bits, and the exceptions, of one set after the other."""

from __future__ import annotations

import functools
import linecache
import math
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import scalars_for
from users_module import module

import pagedopt
from pagedopt import PagedAdamW, RuleError, Sweep, multi_tensor_apply
from pagedopt.rules import RULES, Rule, rule, sign, sqrt
from pagedopt.rules.rule import _find

Sets = list[list[float]]


def one_by_one(subject: Rule, scalars: Mapping[str, Any]) -> Sets | type[BaseException]:
    """What plain numbers give, or the exception that the first set with one raises."""
    count = next(len(v) for v in scalars.values() if isinstance(v, np.ndarray))
    try:
        return [
            subject.uniforms({name: float(v[i]) if isinstance(v, np.ndarray) else v for name, v in scalars.items()})
            for i in range(count)
        ]
    except Exception as error:
        return type(error)


def assert_same_bits(subject: Rule, scalars: Mapping[str, Any]) -> None:
    want = one_by_one(subject, scalars)
    if isinstance(want, type):
        with pytest.raises(want):
            subject.uniform_sets(scalars)
        return
    got = subject.uniform_sets(scalars)
    assert np.array_equal(got.view(np.int64), np.array(want).reshape(got.shape).view(np.int64))


STEPS = st.one_of(
    st.integers(1, 400).map(float), st.floats(-2, 2**33), st.sampled_from([0.0, math.nan, math.inf, -1.0])
)
BETA = st.one_of(st.floats(0.5, 1.0), st.sampled_from([0.0, 1.0, 1.5, -0.5, math.nan, math.inf, 0.999]))


@given(steps=st.lists(STEPS, min_size=8, max_size=40), beta1=BETA, beta2=BETA)
@settings(deadline=None, max_examples=300)
def test_adamw_to_the_bit(steps: list[float], beta1: float, beta2: float) -> None:
    subject = RULES["adamw"]
    assert_same_bits(subject, {**scalars_for(subject, beta1=beta1, beta2=beta2), "step": np.array(steps)})


def test_many_counts_to_the_bit_without_asking_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's ``power`` would fail this, and so would a fall back to one set after the other."""
    subject, steps = RULES["adamw_amsgrad"], np.arange(1.0, 20_000.0)
    scalars = {**scalars_for(subject, beta1=0.9, beta2=0.999), "step": steps}
    want = one_by_one(subject, scalars)
    monkeypatch.setattr(Rule, "uniforms", lambda *_: pytest.fail("asked one by one"))
    assert np.array_equal(subject.uniform_sets(scalars), np.array(want))


@rule
def schedule(param, *, lr, warm, step):  # type: ignore[no-untyped-def]
    """Every construct of the host's part."""
    share = min(1.0, step / warm) if warm > 0 and not step < 0 else max(step, 0.5)
    cycle = step % 7 // 2 + (step > 3) + (0 < step <= 5) - (-(step != 2))
    fall = 1 / (1 + abs(step - warm)) if step > warm or step == 1 else sqrt(abs(lr))
    late = True if step > 100 else 0
    both = 2 if (step > 2 and warm) or lr else 3
    rate = lr * share * sign(cycle - 3) * fall**1.5 + 2**3 * late
    return (param if (step and warm) or lr else 2 * param) - rate * cycle - share * late * both


@given(steps=st.lists(STEPS, min_size=8, max_size=20), warm=st.floats(-5, 50), lr=st.floats(-1, 1))
@settings(deadline=None, max_examples=300)
def test_every_construct_to_the_bit(steps: list[float], warm: float, lr: float) -> None:
    assert_same_bits(schedule, {"lr": lr, "warm": warm, "step": np.array(steps)})
    assert_same_bits(schedule, {"lr": lr, "warm": np.array(steps), "step": warm})


@pytest.mark.parametrize("count", [1, 7, 8])
def test_other_hyperparameters_may_differ_too(count: int) -> None:
    subject = RULES["sgd_momentum"]
    lr, step = np.linspace(0.1, 1, count), np.arange(1.0, count + 1)
    assert_same_bits(subject, {**scalars_for(subject), "lr": lr, "step": step})


ERRORS = [
    ({"beta2": 1.5}, 3.0, RuntimeError, "'adamw': .* has the root of a negative number.*1.5"),
    ({"beta1": 1.0}, 3.0, ZeroDivisionError, "division by zero"),
    ({}, 0.0, ZeroDivisionError, "division by zero"),
]


@pytest.mark.parametrize(("changes", "step", "error", "text"), ERRORS)
@pytest.mark.parametrize("sets", [1, 4, 9])
def test_errors_are_those_of_one_set(
    sets: int, changes: dict[str, float], step: float, error: type[Exception], text: str
) -> None:
    subject = RULES["adamw"]
    scalars = scalars_for(subject, **changes)
    with pytest.raises(error, match=text):
        subject.uniforms({**scalars, "step": step})
    with pytest.raises(error, match=text):
        subject.uniform_sets({**scalars, "step": np.full(sets, step)})


def test_a_second_bias_correction_of_zero_is_infinite() -> None:
    subject = RULES["adamw"]
    scalars = scalars_for(subject, beta2=1.0)
    assert math.inf in subject.uniforms(scalars)
    assert np.isinf(subject.uniform_sets({**scalars, "step": np.arange(1.0, 20)})).any(axis=1).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_parameters_of_many_step_counts_are_updated_as_torch_does(groups: int) -> None:
    """Twenty counts in each group and one alone, in one launch."""
    made = []
    for make in (PagedAdamW, torch.optim.AdamW):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 11, dtype=torch.float64) + i) for i in range(41)]
        parts = [params] if groups == 1 else [params[:20], params[20:]]
        optimizer = make([{"params": part, "lr": 0.1 * (i + 1)} for i, part in enumerate(parts)], betas=(0.8, 0.95))
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = torch.sin(p.detach() * (step + 2) + i)
            optimizer.step()
            if step == 0:
                for i, p in enumerate(params):
                    optimizer.state[p]["step"].fill_(i + 1 if i < 40 else 3)
        made.append(params)
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("numerator", [math.inf, -math.inf, math.nan, 0.0, 1.0])
@pytest.mark.parametrize("sets", [3, 40])
def test_a_division_by_zero_raises_whatever_is_divided(numerator: float, sets: int) -> None:
    """By IEEE 754 inf / 0 and nan / 0 raise no flag."""

    @rule
    def dividing(param, grad, *, lr, step, cap):  # type: ignore[no-untyped-def]
        return param - grad * min(lr, cap / (step - 8))

    steps = np.arange(1.0, sets + 1)
    assert_same_bits(dividing, {"lr": 0.1, "step": steps, "cap": numerator})
    assert_same_bits(dividing, {"lr": 0.1, "step": steps + 8, "cap": np.full(sets, numerator)})


# --- A rule is traced once, of the source that Python runs; where it is used, what is wrong is named ------------------


OWN = """
import pagedopt
RATE = 2.0


def inner(x, by=1.0):
    return x * RATE + by


@pagedopt.rule
def subject(param):
    return inner(param)
"""


def test_what_changes_after_the_first_use_changes_no_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module(OWN, tmp_path)
    own.RATE = 3.0
    x = torch.tensor([1.0])
    multi_tensor_apply(own.subject, [[x]], {})
    assert x.item() == 4.0
    own.RATE, own.inner = 5.0, None
    multi_tensor_apply(own.subject, [[x]], {})
    assert (x.item(), own.subject.out_of_place.program) == (13.0, own.subject.program)


def test_threads_trace_it_once(tmp_path: Path) -> None:
    own = module(OWN.replace("return inner", "calls.append(0)\n    return inner") + "\n\ncalls = []\n", tmp_path)
    begin = threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (begin.wait(), own.subject.uniforms({}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.calls == [0]


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(param, grad):  # type: ignore[no-untyped-def]
        return 2 * function(param, grad)

    return wrapper


def test_a_wrapper_is_what_python_runs() -> None:
    def plain(param, grad):  # type: ignore[no-untyped-def]
        return param if param > grad else grad

    x = torch.tensor([1.0, 5.0])
    multi_tensor_apply(rule(around(around(plain))), [[x], [torch.full((2,), 3.0)]], {})
    assert x.tolist() == [12.0, 20.0]


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    text = "def f(param, grad):\n    param = param - grad\n    return param\n"
    own = module(text, tmp_path)
    changed = [text.replace("param - grad", new) for new in ("param + grad", "param - grad * 2", "param - param")]
    for new in (*changed, "# all gone\n", "def f(:\n"):
        (tmp_path / "users_module.py").write_text(new)
        linecache.clearcache()
        with pytest.raises(RuleError, match=r"users_module\.py:1: .*'f' is not what Python runs"):
            rule(own.f)
    (tmp_path / "users_module.py").write_text(text)
    linecache.clearcache()
    assert rule(own.f)(3.0, 1.0) == 2.0


def test_a_helper_whose_file_has_changed_is_refused(tmp_path: Path) -> None:
    own = module(OWN, tmp_path)
    path = tmp_path / "users_module.py"
    path.write_text(path.read_text().replace("* RATE + by", "+ RATE * by"))
    with pytest.raises(RuleError, match=r"py:12: .*'inner' is no function .*py:6: .*is not what Python runs"):
        own.subject.cuda_source()


def test_how_a_rule_is_written_down_does_not_matter(tmp_path: Path) -> None:
    """Annotations, decorators, strings, line breaks and imports are no part of what Python runs."""
    text = '''
from __future__ import annotations
import math
from math import sqrt as _root, sqrt

def same(function): return function

def make(scale: float, abs=abs):
    @same
    @same
    def f(param: float, grad: "float", *, lr: float = 0.5, nesterov: bool = False) -> tuple[float, int]:
        """Two
             lines."""
        grad = (grad
                if nesterov else
                -0.0 * abs(grad)) + 1e-3
        param = (param - lr *
                 sqrt(grad) * math.sqrt(scale))  # a comment
        return param
    return f
'''
    made = rule(module(text, tmp_path).make(2.0))
    assert made.uniforms({"nesterov": True})[1:] == [0.5]


def test_a_variable_without_a_value_yet_is_refused(tmp_path: Path) -> None:
    text = "def f(param):\n    return param * later\n"
    own = module(f"def make(use):\n{indent(text, '    ')}    use(f)\n    later = 3.0\n    return f", tmp_path)

    def use(function: Callable[..., Any]) -> None:
        with pytest.raises(RuleError, match=r":3: .*NameError: .*'later'"):
            rule(function).cuda_source()

    assert rule(own.make(use)).reference(torch.tensor([2.0]))[0].item() == 6.0


@pytest.mark.parametrize("out_of_place", [False, True])
def test_pickles_find_a_rule_by_its_functions_name(out_of_place: bool) -> None:
    """As those that were made before rules were traced."""
    old = b"cpagedopt.rules.rule\n_find\n(Vpagedopt.rules.adamw\nVadamw\nI0%d\ntR." % out_of_place
    want = RULES["adamw"].out_of_place if out_of_place else RULES["adamw"]
    assert pickle.loads(old) is want is _find("pagedopt.rules.adamw", "adamw", out_of_place)


def test_sign_of_the_rules_is_theirs() -> None:
    assert [sign(x) for x in (-3.0, 0.0, 2)] == [-1.0, 0.0, 1.0]


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
    with pytest.raises(TypeError, match=r"unknown \['lr'\]: in rule 'starless' 'lr' is before the '\*'"):
        multi_tensor_apply(starless, lists(), {"lr": 0.1})


@pytest.mark.parametrize("value", ["a", "1", "", None, 1j, [0.1], torch.ones(2)], ids=repr)
def test_a_scalar_that_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"rule 'descent': the scalar 'lr' is .*; give a number"):
        multi_tensor_apply(descent, lists(), {"lr": value})


@pytest.mark.parametrize("value", [1, True, np.float32(0.5), torch.tensor(0.5), torch.ones(1)], ids=repr)
def test_a_number_is_taken_as_it_was(value: Any) -> None:
    assert descent.uniforms({"lr": value}) == [1 / (2 * float(value))]


def test_an_error_is_named_with_its_expression() -> None:
    for use in (lambda: descent.uniforms({"lr": 0.0}), lambda: descent.uniform_sets({"lr": np.array([1.0, 0.0] * 9)})):
        with pytest.raises(ZeroDivisionError, match=r"rule 'descent': .*division by zero in '1 / rate'; lr=0"):
            use()
    with pytest.raises(OverflowError, match="int too large to convert to float"):
        RULES["add_scalar"].uniforms({"scalar": 10**400})
    adamw = RULES["adamw"]
    scalars = {name: 0.5 for name in adamw.scalars if name not in adamw.defaults}
    with pytest.raises(OverflowError, match=r"rule 'adamw': .* in '1 - beta1 \*\* step'; .*step=100000"):
        adamw.uniforms({**scalars, "beta1": 2.0, "step": 100_000})
