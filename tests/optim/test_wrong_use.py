"""What a user may get wrong is refused at once, and the message says what to write."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats_under_test import WhereItStands

import pagedopt
from pagedopt import PagedAdamW, PagedAdan, PagedLion, PagedSGD, run_with_room
from pagedopt.optim.registry import OPTIMIZERS
from pagedopt.paging.budget import Budget
from pagedopt.system import warn
from pagedopt.transports import MemcpyTransport
from tests.world import is_raised


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(warn, "_said", set())


def parameters(numel: int = 3000) -> list[torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, numel))
    p.grad = torch.ones(numel)
    return [p]


def make(**options: Any) -> PagedAdamW:
    return PagedAdamW(parameters(), **options)


def texts(use: Callable[[], object]) -> list[str]:
    """What a use warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    return [str(each.message) for each in caught]


# --- budgets

UNITS = [
    (50, "device_budget is 50: 50 bytes hold no page; did you mean '50%' or '50GiB'?"),
    ("50", "device_budget is '50': 50 bytes hold no page; did you mean '50%' or '50GiB'?"),
    (1, "device_budget is 1: 1 byte holds no page; did you mean 1.0 (all) or '1GiB'?"),
    (2.0, "device_budget is 2.0: 2 bytes hold no page; did you mean '2%' or '2GiB'?"),
    (4095, "device_budget is 4095: 4,095 bytes hold no page; did you mean '4095MiB'?"),
]


TIME = (
    "20 ms",
    "device_budget is '20 ms', a time; `pagedopt plan --time 20ms --params N` prints the bytes to write instead",
)


@pytest.mark.parametrize(("budget", "text"), [*UNITS, TIME])
def test_a_time_and_a_budget_whose_unit_was_forgotten_are_refused(budget: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make(device_budget=budget)
    optimizer = make(device_budget="50%")
    optimizer.step()
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.set_device_budget(budget)
    assert optimizer.store.budget == Budget("50%")
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        pagedopt.estimate("7B", device_budget=budget)


def test_an_estimate_of_any_bytes_can_be_made() -> None:
    """As a plan does, of budgets that it looks for."""
    assert [pagedopt.estimate("7B", device_budget=Budget(nbytes)).budget for nbytes in (1, 4095)] == [1, 4095]


def test_an_optimizer_that_was_pickled_with_such_a_budget_is_read() -> None:
    state = make(device_budget="50%").__getstate__()
    state["_options"]["device_budget"] = 50
    again = PagedAdamW.__new__(PagedAdamW)
    again.__setstate__(pickle.loads(pickle.dumps(state)))
    assert again.store.budget.nbytes == 50


@pytest.mark.parametrize("budget", [5000, "1%"])
def test_a_budget_that_holds_no_page_warns_once_with_the_size_of_a_page(budget: Any) -> None:
    large = PagedAdamW(parameters(1 << 20), device_budget=budget)
    (said,) = texts(large.step)
    page = int(large.store.arenas[0].layout.page_bytes()[0])
    assert said.startswith(
        f"device_budget={budget!r} holds no page of {page:,} bytes on cpu: all state in such pages is off the device"
    )
    for other in (budget, "4MiB", "50%", "0%", 0):
        assert texts(PagedAdamW(parameters(1 << 20), device_budget=other).step) == []


@pytest.mark.parametrize(
    ("budget", "words"),
    [(None, ""), ("50%", " (budget 50% of the state)"), ("auto", " (budget what the device can spare)"),
     ("4MiB", " (budget 4.00 MiB)")],
)  # fmt: skip
def test_the_report_before_the_first_step_says_the_budget(budget: Any, words: str) -> None:
    report = make(device_budget=budget).memory_report()
    assert str(report) == f"no state: the first step makes it, if the rule has any{words}"
    assert "none: the first step makes it, if the rule has any" in report._repr_html_()
    assert dict(report.facts()[1]).get("budget", "") == words.removeprefix(" (budget ").removesuffix(")")


# --- options without an effect


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [("host_access", "staged", "'staged'"), ("blocks", 8, "8"), ("transport", "struct", "'struct'"),
     ("transport", MemcpyTransport, "MemcpyTransport")],
)  # fmt: skip
def test_options_of_a_gpu_warn_on_a_cpu(option: str, value: Any, shown: str) -> None:
    asked = {"device_budget": 0, option: value}
    said = f"{option}={shown} on cpu: these parameters are on no GPU, so it has no effect"
    assert texts(make(**asked).step) == [said]
    assert texts(make(**asked).step) == texts(make(device_budget=0, transport="managed").step) == []


@pytest.mark.parametrize(("option", "value"), [("seed", 3), ("rounding", "nearest")])
def test_options_of_int8_warn_without_it(option: str, value: Any) -> None:
    said = f"{option}={value!r}: no state_format is 'int8', and it has no effect"
    optimizer = make(**{option: value})
    assert texts(optimizer.step) == [said]
    assert texts(optimizer.step) == []
    assert texts(make(state_format="int8", **{option: value}).step) == []  # also of parameters that stay float32
    groups = [{"params": parameters()}, {"params": parameters(), "state_format": "int8"}]
    assert texts(PagedAdamW(groups, **{option: value}).step) == []
    with_seed = {"exp_avg": WhereItStands(), "exp_avg_sq": "float32"}  # a format of one's own may draw bits
    assert texts(make(state_format=with_seed, **{option: value}).step) == []


@pytest.mark.parametrize(("option", "value"), [("device_budget", "50%"), ("placement", "host"), ("preallocate", True)])
def test_a_group_with_an_option_of_the_whole_optimizer_is_refused(option: str, value: Any) -> None:
    text = f"a parameter group has {option!r}, which holds for all parameters; write PagedAdamW(…, {option}=…)"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PagedAdamW([{"params": parameters(), option: value}])
    optimizer = make()
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.add_param_group({"params": parameters(), option: value})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PagedAdamW([{"params": parameters(), option: None}], **{option: value})
    repeated = PagedAdamW([{"params": parameters(), option: value}], **{option: value})  # by ZeroRedundancyOptimizer
    repeated.set_device_budget("all")  # it goes on to repeat what it was told
    repeated.add_param_group({"params": parameters(), option: value})
    for odd in (np.array([0, 0]), torch.tensor([0, 0]), [value]):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            repeated.add_param_group({"params": parameters(), option: odd})
    optimizer.add_param_group({"params": parameters(), "of_my_own": value, "name": "head"})  # as in torch
    old = copy.deepcopy(optimizer.state_dict())
    old["param_groups"][0][option] = value
    optimizer.load_state_dict(old)
    assert optimizer.param_groups[0][option] == value


def test_a_hyperparameter_may_have_the_name_of_an_option() -> None:
    class Blocks(pagedopt.PagedOptimizer):
        rule = pagedopt.rule(moved)

        def __init__(self, params: Any, blocks: float = 1.0) -> None:
            super().__init__(params, {"blocks": blocks})

    assert Blocks([{"params": parameters(), "blocks": 2.0}]).param_groups[0]["blocks"] == 2.0


def moved(param, grad, *, blocks):  # type: ignore[no-untyped-def]
    param = param - blocks * grad
    return param


# --- arguments and calls

KINDS = (PagedAdamW, PagedSGD, PagedLion)
HYPER: tuple[tuple[dict[str, Any], str], ...] = (
    ({"lr": "3e-4"}, "lr is '3e-4', a text; write the number, as lr=3e-4"),
    ({"weight_decay": ""}, "weight_decay is '', a text; write the number, as weight_decay=0"),
    ({"learning_rate": 1.0}, "__init__() got an unexpected keyword argument 'learning_rate': write lr=…"),
)
BETAS = (0.9, ("0.9", 0.99), (0.9, None), "99", {0.9: 0.99, 0.999: 0}, {0.5})
#: What a name of the package that is not there is answered with.
NAMES = {
    "PagedNadam": "; did you mean PagedNAdam?\n", "PagedMuonn": "\n", "nosuch": "\n",
    "PagedAdamw": "; did you mean PagedAdamW?\n", "PagedLoin": "; did you mean PagedLion?\n",
    "foreach_ad": "; did you mean foreach_add?\n",
    "shadow": ": run examples/beside_torch.py",
}  # fmt: skip
#: What a word that no constructor takes is answered with.
WORDS = {
    "budget": ": write device_budget=…", "overlap": ": call optimizer.attach(model)",
    "decoupled_weight_decay": ": write it into parameter groups", "device_budgt": "; did you mean device_budget?",
    "weight_decy": "; did you mean weight_decay?", "state_fromat": "; did you mean state_format?",
}  # fmt: skip


def theirs() -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters())


#: Act, error, and what it says; a line break is its end.
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((partial(kind, parameters(), **given), TypeError, said) for kind in KINDS for given, said in HYPER),
    *(
        (
            partial(kind, parameters(), betas=betas),
            TypeError, f"betas is {betas!r}; give {like}",
        )
        for kind, like in (
            (PagedAdamW, "two numbers, as betas=(0.9, 0.999)"),
            (PagedLion, "two numbers, as betas=(0.9, 0.99)"),
            (PagedAdan, "three numbers, as betas=(0.98, 0.92, 0.99)"),
        )
        for betas in BETAS
    ),
    *(
        (
            partial(PagedLion, parameters(), betas=betas),
            ValueError, f"betas is {betas}; give two numbers, as betas=(0.9, 0.99)",
        )
        for betas in ((0.9,), (0.9, 0.99, 0.5))
    ),
    (
        lambda: make(betas=(0.9, 0.99, 0.5)).step(),  # where torch raises, too
        ValueError, "betas is (0.9, 0.99, 0.5); rule 'adamw' takes 2 of them",
    ),
    (lambda: make(lr=None), TypeError, "lr is None; give"),
    (lambda: PagedLion(), TypeError, "PagedLion.__init__() missing a required argument: 'params'"),
    *(
        (partial(make, **{word: 1}), TypeError, f"unexpected keyword argument '{word}'{said}")
        for word, said in WORDS.items()
    ),
    *(
        (partial(make, **{option: value}), ValueError, f"{option} is {value!r}; there are {first}")
        for option, value, first in (
            ("state_format", "int3", "float32, bfloat16"), ("placement", "moon", "mapped, managed, host"),
            ("transport", "owl", "hybrid, managed"),
        )
    ),
    *(
        (
            partial(entry.optimizer, parameters(), differentiable=True),
            ValueError, f"{entry.name} does not support it; use torch.optim.{entry.torch.__name__} for that",
        )
        for entry in OPTIMIZERS
        if entry.torch
    ),
    (
        lambda: PagedAdamW(parameters(5000), betas=(0.995, 0.999), state_format="int8"),
        ValueError, "; give that state another format, as state_format={'exp_avg': 'bfloat16', …: 'int8'}",
    ),
    (
        lambda: PagedAdamW([{"param": parameters(), "lr": 1e-3}]),  # a KeyError, as of torch's
        KeyError, "a parameter group has no 'params', and has 'param', 'lr'; write",
    ),
    *(
        (partial(getattr, pagedopt, name), AttributeError, f"has no attribute '{name}'{said}")
        for name, said in NAMES.items()
    ),
    *(
        (lambda path=path: make().load_state_dict(path), TypeError, "write load_state_dict(torch.load('ck.pt'))")
        for path in ("ck.pt", Path("ck.pt"))
    ),
    (lambda: make().load_state_dict(make()), TypeError, "this is an optimizer; pass its state_dict()"),
    (lambda: make().load_state_dict(None), TypeError, "this is None"),
    (lambda: make().load_state_dict(None), AttributeError, "this is None"),  # as of torch's
    (lambda: make().load_state_dict(make()), AttributeError, "this is an optimizer"),
    (
        lambda: make().load_state_dict({"model": {}, "optimizer": make().state_dict()}),
        ValueError, "write load_state_dict(checkpoint['optimizer'])",
    ),
    *(
        (lambda value=value: make().attach(value), TypeError, f"takes a torch.nn.Module, and not {said}")
        for value, said in ((3, "an int"), ([], "a list"), (None, "a NoneType"))
    ),
    (
        lambda: run_with_room(theirs(), print),
        TypeError, "the optimizer is an AdamW, whose state cannot be spilled; give one of pagedopt",
    ),
    (lambda: run_with_room(print, make()), TypeError, "and the function a PagedAdamW; give the optimizer first"),
    (lambda: run_with_room(make(), torch.ones(1)), TypeError, "the function is tensor([1.]); give one without"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "kind", "said"), [pytest.param(*row, id=row[-1].strip()) for row in REFUSED])
def test_what_is_wrong_is_refused_in_words(act: Callable[[], Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert said in f"{caught.value}\n"
    assert is_raised(caught.value), "it just went wrong"


def test_state_of_another_dtype_is_answered_with_the_one_it_should_have() -> None:
    optimizer = make(state_format="float64")
    optimizer.step()
    (entry,) = optimizer.state.values()
    entry["exp_avg"] = entry["exp_avg"].bfloat16()
    with pytest.raises(TypeError, match=r"'exp_avg' of .* is torch.bfloat16; it should be torch.float64 \(by "):
        optimizer.step()


# --- state of another optimizer


def test_state_of_another_optimizer_is_refused_and_keys_of_ones_own_are_not() -> None:
    params = parameters()
    theirs, lion = PagedAdamW(params), PagedLion(params)
    theirs.step()
    lion.step()
    before = copy.deepcopy(lion.state_dict())
    with pytest.raises(ValueError, match="has exp_avg_sq, which no rule of PagedLion has: it is of another optimizer"):
        lion.load_state_dict(theirs.state_dict())
    assert lion.param_groups[0]["lr"] == before["param_groups"][0]["lr"]
    own = copy.deepcopy(before)
    own["state"][0] |= {"mine": torch.ones(3), "step": torch.tensor(7.0)}
    lion.load_state_dict(own)
    assert set(lion.state[params[0]]) == {"exp_avg", "mine", "step"}


def test_state_of_amsgrad_is_of_the_same_optimizer() -> None:
    theirs, ours = (PagedAdamW(parameters(), amsgrad=amsgrad) for amsgrad in (True, False))
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["amsgrad"]


# --- first steps that go wrong


def test_adams_weight_decay_that_a_load_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's AdamW ends it, too, and says nothing."""
    group = {"params": parameters(), "decoupled_weight_decay": False}
    optimizer = PagedAdamW([group], weight_decay=0.1)
    saved = optimizer.state_dict()
    again: Callable[[], Any]
    for again in (
        lambda: optimizer.load_state_dict(copy.deepcopy(saved)),
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.__setstate__({"state": defaultdict(dict)}),
    ):
        monkeypatch.setattr("pagedopt.system.warn._said", set())
        optimizer.param_groups[0]["decoupled_weight_decay"] = False
        (said,) = texts(again)
        assert "set it in each of optimizer.param_groups again" in said
    optimizer.load_state_dict(saved)
    theirs = torch.optim.AdamW([group], weight_decay=0.1)
    theirs.load_state_dict(saved)
    both = [each.param_groups[0]["decoupled_weight_decay"] for each in (optimizer, theirs)]
    assert both == [True, True]
    monkeypatch.setattr("pagedopt.system.warn._said", set())
    assert texts(lambda: make(weight_decay=0).load_state_dict(torch.optim.Adam(parameters()).state_dict())) == []


def test_a_model_without_a_parameter_of_the_optimizer_is_told_when_it_is_attached() -> None:
    model = torch.nn.Linear(3, 2)
    (said,) = texts(lambda: make().attach(model))
    assert said == "this Linear holds no parameter of this optimizer, so its forward hides nothing"
    assert texts(lambda: PagedAdamW(model.parameters()).attach(model)) == []
