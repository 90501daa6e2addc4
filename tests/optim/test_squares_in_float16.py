"""Squares underflow in float16: ``state_format`` refuses it for them unless the parameter is float16, too."""

from __future__ import annotations

import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from optim_support import step_on_ones

import pagedopt
from pagedopt import Moment, PagedAdamW, PagedLion, PagedOptimizer, PagedSGD
from pagedopt.formats import FORMATS
from pagedopt.optim.options import TABLE
from pagedopt.system import warn

F16, F32 = torch.float16, torch.float32
SQUARES = re.escape("state_format is 'float16' for 'exp_avg_sq' of a parameter of torch.")
#: What gives float16 to second moments.
HALVES: tuple[Any, ...] = ("float16", "fp16", "half", F16, FORMATS["float16"], {"exp_avg_sq": "half"})


def parameter(dtype: torch.dtype = F32, value: float = 1.0) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = torch.full_like(p, value)
    return p


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning has been given yet."""
    monkeypatch.setattr(warn, "_said", set())


@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", HALVES, ids=str)
def test_an_optimizer_refuses_it_for_squares(given: Any, dtype: torch.dtype) -> None:
    text = rf"^{SQUARES}\w+: it holds squares, .* below 3e-8 to zero; give 'bfloat16' or 'float32'"
    with pytest.raises(ValueError, match=text):
        PagedAdamW([parameter(F16), parameter(dtype)], state_format=given)
    optimizer = PagedAdamW([parameter(dtype)])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [parameter(dtype)], "state_format": given})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=text):
        pagedopt.estimate([(3,)], param_dtype=dtype, state_format=given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [(PagedAdamW, F16, {"state_format": "float16"}), (PagedAdamW, F32, {"state_format": {"exp_avg": "float16"}}),
     (PagedLion, F32, {"state_format": "float16"}), (PagedSGD, F32, {"state_format": "float16", "momentum": 0.9})],
    ids=str,
)  # fmt: skip
def test_it_is_taken_for_first_moments_and_of_float16_parameters(kind: Any, dtype: torch.dtype, options: Any) -> None:
    assert kind([parameter(dtype)], **options).param_groups
    rule = {PagedAdamW: "adamw", PagedLion: "lion", PagedSGD: "sgd_momentum"}[kind]
    assert pagedopt.estimate([(3,)], rule=rule, param_dtype=dtype, state_format=options["state_format"])


def level(param, grad, level, *, lr):  # type: ignore[no-untyped-def]
    """A sum of squares."""
    level = level + grad * grad
    param = param - lr * grad * level
    return param, level


def of(**moments: Moment) -> type[PagedOptimizer]:
    """An optimizer whose rule says this of its state."""

    class Level(PagedOptimizer):
        rule = pagedopt.rule(moments=moments)(level)

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, {"lr": 0.1}, **options)

    return Level


def test_a_rule_of_ones_own_says_it() -> None:
    with pytest.raises(ValueError, match=r"state_format is 'float16' for 'level' of .* it holds squares"):
        of(level=Moment(signed=False, squares=True))([parameter()], state_format="float16")
    with pytest.raises(ValueError, match="a Moment is signed and holds squares"):
        Moment(squares=True)


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize(
    ("moments", "warned"),
    [({}, True), ({"level": Moment(signed=False)}, True), ({"level": Moment(signed=False, squares=False)}, False),
     ({"level": Moment()}, False)],
    ids=str,
)  # fmt: skip
def test_a_rule_that_does_not_say_it_is_warned_of_once(moments: dict[str, Moment], warned: bool) -> None:
    kind = of(**moments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            kind([parameter()], state_format="float16")
        kind([parameter(F16)], state_format="float16")
        kind([parameter()], state_format="bfloat16")
    text = "rule 'level' does not say whether that state holds squares"
    assert [text in str(each.message) for each in caught] == [True] * warned
    assert all("moments={'level': pagedopt.Moment(signed=…, squares=…)}" in str(each.message) for each in caught)


def halved() -> tuple[torch.nn.Parameter, PagedAdamW]:
    """An optimizer after a step as it was before float16 was refused."""
    p = parameter()
    optimizer = PagedAdamW([p])
    optimizer.step()
    optimizer.state_format = "float16"
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = optimizer.state[p][name].half()
    return p, optimizer


@pytest.mark.usefixtures("unsaid")
def test_an_old_pickle_loads_warns_and_goes_on() -> None:
    p, optimizer = halved()
    with pytest.warns(RuntimeWarning, match=f"^{SQUARES}float32: it holds squares") as caught:
        twin = pickle.loads(pickle.dumps(optimizer))
    assert len(caught) == 1
    (q,) = twin.param_groups[0]["params"]
    for each in (optimizer, twin):
        step_on_ones(each)
    assert torch.equal(p, q)
    assert twin.state_format == "float16"
    assert twin.state[q]["exp_avg_sq"].dtype is F16


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("way", ["cast", "group"])
def test_what_becomes_so_later_is_warned_of_where_state_is_made(way: str) -> None:
    p = parameter(F16 if way == "cast" else F32)
    optimizer = PagedAdamW([p], state_format="float16" if way == "cast" else None)
    if way == "cast":
        p.grad, p.data = None, p.data.float()
        p.grad = torch.ones_like(p)
    else:
        optimizer.param_groups[0]["state_format"] = "float16"
    with pytest.warns(RuntimeWarning, match=f"^{SQUARES}float32: it holds squares"):
        optimizer.step()


def test_of_float16_parameters_small_squares_are_lost_as_in_torch_and_the_page_says_which() -> None:
    said = TABLE["state_format"].values["None"]
    assert "squares below 3e-8 to zero: with a `beta2` of 0.999 the second moment of gradients below 0.005" in said
    for kind in (PagedAdamW, torch.optim.AdamW):
        for value, lost in ((0.005, True), (0.006, False)):
            p = parameter(F16, value)
            optimizer = kind([p], eps=1e-4)
            for _ in range(3):
                optimizer.step()
            assert optimizer.state[p]["exp_avg_sq"].dtype is F16
            assert (optimizer.state[p]["exp_avg_sq"] == 0).all() == lost
