"""Rules of several: the bits of one launch after another, names, what is refused; rules that return the gradient."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any, ClassVar

import nvrtc_support
import pytest
import torch
from kernel_names import instance
from often import long_but
from support import BF16, F16, F32, F64

import pagedopt
from pagedopt import Moment, PagedOptimizer, Rule, RuleError, Sweep, compose, multi_tensor_apply
from pagedopt.formats import FORMATS
from pagedopt.formats.int8 import FIRST
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES, fma
from tests.card.kernels import Play, build, functors, launch
from tests.outside.element_format import Fixed16

CODES = FIRST["nearest"]


@pagedopt.rule
def clipped(param, grad, *, most):  # type: ignore[no-untyped-def]
    """Changes the gradient alone."""
    grad = max(-most, min(grad, most))
    return grad


@pagedopt.rule
def fading(weight, *, rate):  # type: ignore[no-untyped-def]
    """Has no gradient."""
    return weight * (1 - rate)


@pagedopt.rule(moments={"exp_avg": Moment(decay="beta")})
def counting(p, g, exp_avg, *, lr, beta, turn, most=0.5):  # type: ignore[no-untyped-def]
    """Other names of the first two, state that another has, and a number of its own; it shrinks the gradient."""
    turn = turn * 0.5
    exp_avg = fma(beta, exp_avg, g) if turn > 0.1 else g
    p = p - lr * turn * exp_avg
    g = 0.125
    return p, g, exp_avg, turn


STEP = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
CASES: list[tuple[tuple[Rule, ...], dict[str, float]]] = [
    ((clipped, RULES["adamw"]), {"most": 0.5, **STEP}),
    ((clipped, RULES["adamw"], RULES["lion"]), {"most": 0.5, **STEP}),
    ((counting, RULES["lion"], counting, fading), {**STEP, "beta": 0.9, "turn": 0.4, "turn_2": 0.1, "rate": 0.01}),
    ((fading, fading), {"rate": 0.3}),
    ((compose(clipped, counting), compose(RULES["sgd"], fading)), {"turn": 1, "beta": 0.5, "rate": 0.1, "most": 0.5,
                                                                   **STEP}),
]  # fmt: skip
MADE = [compose(*rules) for rules, _ in CASES]
#: Of parameter, gradient and each state in turn.
DTYPES = [(F32,) * 5, (F16, F32, BF16, BF16, F32), (F64,) * 5]


def lists(dtypes: tuple[torch.dtype, ...], count: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    some = [torch.randn(1031, generator=generator) for _ in range(count)]
    return [[(x.abs() if i > 1 else x).to(dtypes[i % 5])] for i, x in enumerate(some)]


def one_by_one(rules: tuple[Rule, ...], values: list[list[torch.Tensor]], scalars: dict[str, float]) -> None:
    state, numbers = iter(values[2:]), iter(n for n in scalars if n.startswith("turn"))
    for each in rules:
        if each.parts:
            each_state = list(itertools.islice(state, len(each.inputs) - 2))
            one_by_one(each.parts, [*values[:2], *each_state], scalars)
            continue
        own = [*values[: min(2, len(each.inputs))], *itertools.islice(state, max(0, len(each.inputs) - 2))]
        names = {n: next(numbers) if n == "turn" else n for n in each.scalars}
        multi_tensor_apply(each, own, {n: scalars[of] for n, of in names.items() if of in scalars})


def play_of(made: Rule, dtypes: tuple[torch.dtype, ...]) -> Play:
    every = [(rule, types[: len(rule.inputs)]) for rule in MADE for types in DTYPES[:2]]
    plays = build(tuple(instance(*each, 512, "TableAt") for each in every), functors(MADE))
    return plays[every.index((made, dtypes))]


@pytest.mark.parametrize(
    "dtypes", long_but(DTYPES, DTYPES[:2].__contains__), ids=lambda d: "-".join(str(x)[6:] for x in d)
)
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: MADE[i].name)
def test_the_bits_are_those_of_one_launch_after_another(index: int, dtypes: tuple[torch.dtype, ...]) -> None:
    (rules, scalars), made = CASES[index], MADE[index]
    given = {name: value for name, value in scalars.items() if name in made.scalars}
    values = lists(dtypes, len(made.inputs))
    together, apart, played = (copy.deepcopy(values) for _ in range(3))
    multi_tensor_apply(made, together, given)
    one_by_one(rules, apart, scalars)
    assert all(torch.equal(a, b) for (a,), (b,) in zip(together, apart, strict=True))
    assert not torch.equal(together[0][0], values[0][0])
    if dtypes in DTYPES[:2]:
        sweep = Sweep(made, played)
        sweep.set_scalars([made.uniforms(given)])
        launch(play_of(made, dtypes[: len(made.inputs)]), sweep.table.host)
        assert all(torch.equal(a, b) for (a,), (b,) in zip(together, played, strict=True))


def test_names_moments_and_numbers() -> None:
    made = MADE[2]
    assert made.inputs == ("p", "g", "exp_avg", "exp_avg_2", "exp_avg_3")
    given = ("lr", "beta", "most", "beta1", "beta2", "weight_decay", "maximize", "rate")
    assert made.scalars == (*given, "turn", "turn_2")
    assert {n: m.decay for n, m in made.moments.items()} == {
        "exp_avg": "beta",
        "exp_avg_2": "beta2",
        "exp_avg_3": "beta",
    }
    assert list(made.carried) == ["turn", "turn_2"]
    assert made.defaults == {"most": 0.5, "maximize": False, "weight_decay": 0.0}
    assert (made.writes, made.name) == ((0, 1, 2, 3, 4), "counting_then_lion_then_counting_then_fading")
    assert compose(clipped, counting).defaults == {}  # the first has none
    again = pickle.loads(pickle.dumps((made, made.out_of_place)))
    assert [r.cuda_source() for r in again] == [made.cuda_source(), made.out_of_place.cuda_source()]
    assert fading(3.0, rate=0.5) == compose(fading)(3.0, rate=0.5)[0] == 1.5
    x = torch.tensor([4.0])
    assert compose(fading, fading).reference(x, rate=0.5)[0].item() == 1.0


def test_called_in_another_rule_it_rounds_nothing() -> None:
    both = compose(fading, fading)

    @pagedopt.rule
    def outer(p, g, *, rate):  # type: ignore[no-untyped-def]
        g = both(g, rate=rate)[0] * p
        return g

    assert "stored<0, S, T...>" in both.cuda_source()
    assert "stored<" not in outer.cuda_source()
    assert outer.reference(*torch.tensor([[2.0], [4.0]]), rate=0.5)[0].tolist() == [2.0]


def test_in_an_optimizer_it_trains_as_its_parts_do() -> None:
    class Both(PagedOptimizer):
        rule = compose(RULES["lion"], fading)
        initial: ClassVar[dict[str, Any]] = {}

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "rate": 0.25}, **options)

    found = [torch.nn.Parameter(torch.linspace(-1, 1, 5000).to(BF16)) for _ in range(2)]
    other = pagedopt.PagedLion(found[1:], lr=0.1, betas=(0.9, 0.99))
    both = Both(found[:1])
    for _ in range(3):
        for p in found:
            p.grad = torch.sin(3 * p.detach())
        both.step()
        other.step()
        multi_tensor_apply(fading, [[found[1].detach()]], {"rate": 0.25})
        assert torch.equal(*found)


def test_it_compiles() -> None:
    nvrtc_support.nvrtc()
    made = MADE[0]
    types = (FORMATS["bfloat16"], FORMATS["float16"], CODES, CODES)
    names = [instance(made, (BF16, F16, F32, F32), 512, "TableAt"), source.instance(made, types, 512, "TableAt")]
    cubin, symbols = nvrtc.compile_cuda(source.text(made, types), tuple(names), "sm_90")
    assert all(symbol.encode() in cubin for symbol in symbols)


@pagedopt.rule
def given_turn(p, g, *, turn):  # type: ignore[no-untyped-def]
    return p - turn * g


@pagedopt.rule
def other_most(p, g, *, most=0.25):  # type: ignore[no-untyped-def]
    return p - most * g


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ((counting, given_turn), RuleError, "'turn' is a number that one of them counts, and another is given"),
        ((counting, other_most), RuleError, "two defaults of 'most', 0.5 and 0.25"),
        ((RULES["adamw_amsgrad"],) * 5, RuleError, "17 tensors; there may be 16"),
        ((), TypeError, "there are none"), ((len,), TypeError, "decorated with pagedopt.rule"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(rules: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        compose(*rules)


def test_a_list_of_blocks_between_two_rules_is_refused() -> None:
    made = compose(fading, fading)
    codes = [[torch.zeros(512, dtype=torch.int8)], [torch.zeros(2)]]
    with pytest.raises(
        ValueError, match=r"in 'weight'; format 'int8, root 3, nearest' stores blocks.* one after another"
    ):
        Sweep(made, codes, formats=[CODES])
    Sweep(fading, codes, formats=[CODES])


def test_a_format_of_ones_own_rounds_between_two_rules() -> None:
    x, y = (torch.full((9,), 1234, dtype=torch.int16) for _ in range(2))
    Sweep(compose(fading, fading), [[x]], formats=[Fixed16()]).run({"rate": 0.3})
    for _ in range(2):
        Sweep(fading, [[y]], formats=[Fixed16()]).run({"rate": 0.3})
    assert x.tolist() == y.tolist() != [1234] * 9


def test_a_rule_that_returns_its_gradient_is_no_optimizers() -> None:
    params, grads = [torch.ones(3)], [torch.full((3,), 2.0)]
    multi_tensor_apply(clipped, [params, grads], {"most": 0.5})
    assert grads[0].tolist() == [0.5] * 3

    class Clips(PagedOptimizer):
        rule = compose(clipped, RULES["sgd"])

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "most": 0.5})

    with pytest.raises(RuleError, match="returns 'grad', its second input, which is the gradient and stays"):
        Clips([torch.nn.Parameter(params[0])])


@pagedopt.rule
def falling(x, d, *, lr):  # type: ignore[no-untyped-def]
    """Calls its gradient d."""
    x = x - lr * d
    return x


@pagedopt.rule
def shrinking(param, grad, m, *, d=0.5, x=0.25):  # type: ignore[no-untyped-def]
    """Has hyperparameters of these names."""
    m = m + grad
    param = param - d * x
    return param, m


@pytest.mark.parametrize("rules", [(falling, shrinking), (shrinking, falling)], ids=["tensors first", "numbers first"])
def test_a_hyperparameter_may_be_called_as_a_tensor_of_another_rule(rules: tuple[Rule, ...]) -> None:
    both = compose(*rules)
    assert len({*both.inputs, *both.scalars}) == len(both.inputs) + len(both.scalars)
    param, grad, m = (torch.full((3,), value, dtype=F64) for value in (1.0, 10.0, 0.0))
    multi_tensor_apply(both, [[param], [grad], [m]], {"lr": 0.125, "d": 4.0})
    assert (param.tolist(), m.tolist()) == ([1 - 1.25 - 1.0] * 3, [10.0] * 3)


def test_a_default_that_is_no_number_is_one_default() -> None:
    @pagedopt.rule
    def capped(param, grad, *, cap=math.nan):  # type: ignore[no-untyped-def]
        return param - min(grad, cap)

    assert math.isnan(compose(capped, capped).defaults["cap"])
