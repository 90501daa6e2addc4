"""Which format ``state_format="int8"`` stands for, by state, decay and group; and what it refuses, in words."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import pytest
import torch

import pagedopt
from pagedopt import Moment, PagedAdamax, PagedAdamW, PagedLion, PagedOptimizer, PagedScheduleFreeAdamW, PagedSGD
from pagedopt.formats.choice import Rounding, State
from pagedopt.formats.floating import CHOICES, chosen_format
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import FEWEST, FIRST, INT8, SECOND

MEAN, SQUARE, MOST = Moment(decay="beta1"), Moment(signed=False, decay="beta2"), Moment(signed=False)
STATES: list[tuple[Moment, float | None, Rounding, Format]] = [
    (MEAN, 0.9, None, FIRST["by step"]), (MEAN, 0.99, "stochastic", FIRST["by step"]),
    (MEAN, None, None, FIRST["by step"]), (MEAN, 0.9, "nearest", FIRST["nearest"]),
    (SQUARE, 0.999, None, SECOND["by step"]), (SQUARE, 0.99, None, SECOND["by step"]),
    (SQUARE, 0.9899, None, SECOND["nearest"]), (SQUARE, None, None, SECOND["by step"]),
    (SQUARE, 0.999, "nearest", SECOND["nearest"]), (SQUARE, 0.5, "stochastic", SECOND["by step"]),
    (MOST, None, None, SECOND["nearest"]), (MOST, None, "stochastic", SECOND["nearest"]),
]  # fmt: skip


@pytest.mark.parametrize(("moment", "decay", "rounding", "form"), STATES)
def test_sign_decay_and_rounding_choose_the_format(
    moment: Moment, decay: float | None, rounding: Rounding, form: Format
) -> None:
    state = State("s", FEWEST, "r", moment, decay, rounding)
    assert INT8.of(state) is form
    assert INT8.of(State("s", FEWEST - 1, "r", moment, decay, rounding)) is torch.float32
    forms = FIRST if form in FIRST.values() else SECOND
    by_data = forms["nearest"] if form is forms["nearest"] else forms["by data"]
    assert INT8.of(dataclasses.replace(state, counted=False)) is by_data


def test_its_names() -> None:
    assert CHOICES == {"int8": INT8}
    assert chosen_format("8bit", "exp_avg") is chosen_format({"exp_avg": "int8"}, "exp_avg") is INT8
    assert chosen_format(INT8, "exp_avg") is INT8


@pagedopt.rule
def unknown(param, grad, level, *, lr):  # type: ignore[no-untyped-def]
    """State of which the rule says nothing."""
    level = level + grad
    param = param - lr * level
    return param, level


@pagedopt.rule(moments={"level": SQUARE})
def uncounted(param, grad, level, *, lr, beta2):  # type: ignore[no-untyped-def]
    """A mean of squares, and no step."""
    level = beta2 * level + (1 - beta2) * grad * grad
    param = param - lr * grad * level
    return param, level


@pagedopt.rule(moments={"level": SQUARE})
def forgotten(param, grad, level, *, lr, beta2, step):  # type: ignore[no-untyped-def]
    """The same, and a step that no state remembers."""
    level = beta2 * level + (1 - beta2) * grad * grad
    param = param - lr / step * grad * level
    return param, level


class Unknown(PagedOptimizer):
    """An optimizer of a rule without moments."""

    rule = unknown

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1}, **options)


class Uncounted(PagedOptimizer):
    """An optimizer whose state has no step."""

    rule = uncounted
    has_step: ClassVar[bool] = False

    def __init__(self, params: Any, beta2: float = 0.999, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta2": beta2}, **options)


class Forgotten(Uncounted):
    """The same of a rule that takes the step: it begins anew with each load."""

    rule = forgotten


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Unknown, {}, "state 'level' of rule 'unknown' cannot be stored in int8: the rule does not say whether it may be "
                  "negative; decorate the rule with @pagedopt.rule(moments={'level': pagedopt.Moment("),
    (PagedAdamW, {"betas": (0.995, 0.999)}, "state 'exp_avg' of rule 'adamw' cannot be stored in int8: its decay "
                                            "beta1 is 0.995, and codes follow first moments up to 0.99"),
    (PagedLion, {"betas": (0.9, 0.999)}, "state 'exp_avg' of rule 'lion' cannot be stored in int8: its decay beta2"),
    (PagedAdamax, {}, "'exp_inf' of rule 'adamax' cannot be stored in int8: a maximum that decays stays at its code "
                      "if it is rounded to the nearest, and climbs if at random; give that"),
    (PagedScheduleFreeAdamW, {}, "cannot be stored in int8: it holds weights, and neighbouring codes are 2.4 % apart"),
    (PagedSGD, {"momentum": 0.999}, "state 'momentum_buffer' of rule 'sgd_momentum' cannot be stored in int8"),
    (PagedAdamW, {"rounding": "up"}, "rounding is 'up'; it must be 'nearest', 'stochastic' or None"),
    (PagedAdamW, {"seed": -1}, "seed is -1; it must be a whole number from 0 to 2,097,151"),
    (PagedAdamW, {"seed": 1 << 21}, "seed is 2097152; it must be"), (PagedAdamW, {"seed": True}, "seed is True; it"),
    (PagedAdamW, {"seed": 1.0}, "seed is 1.0; it must be"), (PagedAdamW, {"seed": None}, "seed is None; it must be"),
]  # fmt: skip


def large(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A parameter whose state is stored in 8 bits, with a gradient."""
    p = torch.nn.Parameter(torch.ones(FEWEST, dtype=dtype))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.parametrize(("kind", "options", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_when_an_optimizer_is_made(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        kind([large()], state_format="int8", **options)


@pytest.mark.parametrize("kind", [Uncounted, Forgotten])
def test_where_no_steps_are_counted_the_block_s_own_numbers_draw(kind: Any) -> None:
    """A step that no state remembers begins anew with each load."""
    p = large()
    opt = kind([p], state_format="int8")
    assert opt.format_of("level", p, opt.param_groups[0]) is SECOND["by data"]


OF_GROUPS = [{"state_format": "int9"}, {"rounding": "up"}, {"seed": -3}, {"betas": (0.999, 0.999)}]


@pytest.mark.parametrize("bad", OF_GROUPS, ids=str)
def test_a_group_with_such_an_option_is_refused_and_not_added(bad: dict[str, Any]) -> None:
    opt = PagedAdamW([large()], state_format="int8")
    with pytest.raises(ValueError, match=r"state_format is 'int9'|rounding is|seed is -3|its decay beta1 is 0\.999"):
        opt.add_param_group({"params": [large()], **bad})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("numel", [3, FEWEST])
def test_complex_parameters_are_refused(numel: int) -> None:
    with pytest.raises(ValueError, match=r"state_format is 'int8' for '\w+' of a parameter of torch\.complex64"):
        PagedAdamW([torch.nn.Parameter(torch.ones(numel, dtype=torch.complex64))], state_format="int8")


def test_a_decay_that_becomes_too_slow_is_refused_by_the_step_and_changes_nothing() -> None:
    p = large()
    opt = PagedAdamW([p], state_format="int8")
    opt.step()
    want = [p.detach().clone(), *(t.clone() for t in opt.state[p].values())]
    opt.param_groups[0]["betas"] = (0.999, 0.999)
    with pytest.raises(ValueError, match=r"its decay beta1 is 0\.999"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(want, [p, *opt.state[p].values()], strict=True))
    opt.param_groups[0]["betas"] = (0.9, 0.999)
    opt.step()
    assert float(opt.state[p]["step"]) == 2


SLOW: dict[str, Any] = {"betas": (0.995, 0.999), "state_format": "int8"}


def test_a_slow_decay_is_taken_where_no_code_is_stored() -> None:
    """All parameters are so small that their state is float32."""
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = PagedAdamW([p], **SLOW)
    for _ in range(2):
        opt.step()
    assert opt.state[p]["exp_avg"].dtype is torch.float32
    opt.add_param_group({"params": [large()], "betas": (0.9, 0.999)})
    with pytest.raises(ValueError, match=r"its decay beta1 is 0\.995"):
        opt.add_param_group({"params": [large()]})
    opt.step()


def test_a_slow_decay_that_is_loaded_is_refused_and_changes_nothing() -> None:
    (p, opt), other = ((p := large()), PagedAdamW([p], state_format="int8")), PagedAdamW([large()], betas=SLOW["betas"])
    for steps in range(2):
        with pytest.raises(ValueError, match=r"its decay beta1 is 0\.995"):
            opt.load_state_dict(other.state_dict())
        assert opt.param_groups[0]["betas"] == (0.9, 0.999)
        opt.step()
        assert float(opt.state[p]["step"]) == steps + 1


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


def test_a_decay_on_a_device_is_asked_once_when_state_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    p, read = large(), []
    opt = PagedAdamW([p], state_format="int8")
    monkeypatch.setattr(OnDevice, "__float__", lambda beta: read.append(1) or beta.as_subclass(torch.Tensor).item())
    for beta in (0.995, 0.9):
        opt.param_groups[0]["betas"] = tuple(torch.tensor(b).as_subclass(OnDevice) for b in (beta, 0.999))
        if beta == 0.995:
            with pytest.raises(ValueError, match=r"its decay beta1 is 0\.995"):
                opt.step()
            assert not opt.state
        else:
            read.clear()
            for _ in range(3):
                opt.step()
    assert len(read) == 2  # of both moments


def test_what_a_rule_says_of_its_states_is_checked() -> None:
    for moments, error, text in (
        ({"grad": MEAN}, ValueError, "moments names 'grad', which is no state of it; there is level"),
        ({"level": MEAN}, ValueError, "the decay of 'level' is 'beta1', which is no hyperparameter of it; there is lr"),
        ({"level": False}, TypeError, "moments['level'] is False; give a pagedopt.Moment"),
    ):
        with pytest.raises(error, match=re.escape(f"rule 'unknown': {text}")):
            pagedopt.rule(moments=moments)(unknown.function)  # type: ignore[arg-type]
