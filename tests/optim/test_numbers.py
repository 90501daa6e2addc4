"""Numbers that each parameter has for itself beside ``step``, through an optimizer of a user's own: torch's NAdam."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from optim_support import COPIES, same
from support import default_dtype

import pagedopt
from pagedopt import PagedSGD
from tests.outside.nadam import NAdam, nadam
from tests.world import Params, groups_of, numbers, parameters, steps

OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "momentum_decay": 0.05}
PLACES: list[dict[str, Any]] = [{}, {"device_budget": 0}, {"device_budget": 90_000}]


class PagedNAdam(NAdam):
    """With these numbers, unless others are given."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{**OPTIONS, **options})


class Uncounted(PagedNAdam):
    """Its state holds no steps."""

    has_step = False


def theirs(params: Any) -> torch.optim.NAdam:
    return torch.optim.NAdam(params, foreach=False, **OPTIONS)


class World(NamedTuple):
    """An optimizer and its parameters."""

    optimizer: Any
    params: Params

    def numbers(self) -> list[float]:
        return [float(self.optimizer.state[p]["mu_product"]) for p in self.params]


def made(kind: Callable[..., Any] = PagedNAdam, **how: Any) -> World:
    params = parameters()
    return World(kind(groups_of(params), **how), params)


def both(**how: Any) -> tuple[World, World]:
    """Ours and torch's."""
    return made(**how), made(theirs)


def train(optimizer: torch.optim.Optimizer, params: Params, count: int = 20, first: int = 0) -> None:
    """Now and then one has no gradient (the last one none at first); the second group's lr changes on the way."""
    for step in range(first, first + count):
        for i, p in enumerate(params):
            p.grad = numbers(p.shape, 31 * step + 7 * i + 1).to(p.dtype)
        if step % 3 == 1:
            params[step % 4].grad = None
        if step < 7:
            params[-1].grad = None
        if step == 9:
            optimizer.param_groups[1]["lr"] = 0.01
        optimizer.step()


def train_alike(one: World, other: World, count: int = 20, first: int = 0, exact: bool = False) -> None:
    train(*one, count, first)
    train(*other, count, first)
    assert_alike(one, other, exact)


def assert_alike(one: World, other: World, exact: bool = False) -> None:
    bound: Any = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-5, "atol": 2e-6}
    for p, q in zip(one.params, other.params, strict=True):
        torch.testing.assert_close(p, q, **bound)
        assert list(one.optimizer.state[p]) == list(other.optimizer.state[q])
        torch.testing.assert_close(one.optimizer.state[p], other.optimizer.state[q], **bound)


@pytest.mark.parametrize("how", PLACES, ids=str)
def test_nadam_is_torchs(how: dict[str, Any]) -> None:
    ours, other = both(**how)
    train_alike(ours, other)
    assert len(set(ours.numbers())) > 2
    assert all(list(ours.optimizer.state[p]) == ["step", "mu_product", "exp_avg", "exp_avg_sq"] for p in ours.params)


@default_dtype(torch.float64)
def test_it_has_the_dtype_of_step_counts() -> None:
    ours, other = both()
    train_alike(ours, other)
    assert ours.optimizer.state[ours.params[0]]["mu_product"].dtype is torch.float64


@pytest.mark.parametrize("how", PLACES, ids=str)
def test_a_state_dict_goes_to_torch_and_comes_back(how: dict[str, Any]) -> None:
    ours, other = both(**how)
    train(*other, 8)
    for p, q in zip(ours.params, other.params, strict=True):
        p.data.copy_(q)
    ours.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    train_alike(ours, other, 6, first=8)
    saved = {**ours.optimizer.state_dict(), "param_groups": other.optimizer.state_dict()["param_groups"]}
    saved["param_groups"][1]["lr"] = 0.01
    other.optimizer.load_state_dict(copy.deepcopy(saved))
    train_alike(ours, other, 6, first=14)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("how", PLACES, ids=str)
def test_a_copy_goes_on_by_itself(how: dict[str, Any], copied: Callable[[Any], Any]) -> None:
    ours = made(**how)
    train(*ours, 8)
    train_alike(ours, copied(ours), 8, first=8, exact=True)


@pytest.mark.parametrize("how", PLACES[1:], ids=str)
def test_its_state_in_8_bits_is_the_same_everywhere(how: dict[str, Any]) -> None:
    """The rule says which of its states may be negative, and by what they decay; this beta2 is rounded to nearest."""
    here, there = made(state_format="int8"), made(state_format="int8", **how)
    for world in (here, there):
        train(*world)
    stored = [set(here.optimizer.state[p]) for p in here.params]
    assert {"exp_avg.root3", "exp_avg_sq.root4"} <= set().union(*stored)
    for p, q in zip(here.params, there.params, strict=True):
        assert same((p, *here.optimizer.state[p].values()), (q, *there.optimizer.state[q].values()))


def test_it_costs_no_budget() -> None:
    ours, params = world = made(device_budget=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(*world, 8)
        ours.state[params[0]]["mu_product"] = torch.tensor(0.5)
        train(*world, 2, first=8)
    held = sum(t.nbytes for e in ours.state.values() for n, t in e.items() if n not in ("step", "mu_product"))
    before = ours.memory_report().by_place
    ours.state[params[0]]["mu_product"] = torch.tensor(0.5, dtype=torch.float64)
    assert sum(before.values()) >= held
    assert ours.memory_report().by_place == before


def _replace(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry.update(mu_product=copy.deepcopy(value))


def _between_words(value: float) -> torch.Tensor:
    """At an address that is no multiple of its size."""
    return torch.frombuffer(bytearray(6), dtype=torch.float32, offset=2, count=1).view(()).fill_(value)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "filled": lambda entry: entry["mu_product"].fill_(0.3),
    "float64": _replace(torch.tensor(0.3, dtype=torch.float64)),
    "one dimension": _replace(torch.tensor([0.3])),
    "of a larger": _replace(torch.full((5,), 0.3)[3]),
    "between words": lambda entry: entry.update(mu_product=_between_words(0.3)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("only", [None, 1])
def test_what_is_written_there_counts(edit: Callable[[dict[str, Any]], Any], only: int | None) -> None:
    worlds = both()
    for optimizer, params in worlds:
        steps(optimizer, params, 2)
        for p in params if only is None else params[only : only + 1]:
            edit(optimizer.state[p])
        steps(optimizer, params, 3, first=2)
    assert_alike(*worlds)


def test_zeros_of_both_signs_stay_apart() -> None:
    ours, params = made()
    steps(ours, params, 1)
    for p in params:
        ours.state[p]["mu_product"].zero_()
    steps(ours, params, 1, first=1)
    ours.state[params[1]]["mu_product"].fill_(-0.0)
    steps(ours, params, 1, first=2)
    assert [p for p in params if ours.state[p]["mu_product"].signbit()] == [params[1]]


@pytest.mark.parametrize(("name", "values"), [("mu_product", (0.9, 0.6)), ("step", (9.0, 3.0))])
def test_one_number_for_several_parameters_changes_with_each_of_them(name: str, values: tuple[float, float]) -> None:
    """One of them is absent once; as in torch's loop each takes what the one before it has left."""
    worlds = both()
    for optimizer, params in worlds:
        steps(optimizer, params, 2)
        for value, indices in zip(values, ((0, 2, 4), (1, 3)), strict=True):
            one = torch.tensor(value)
            for index in indices:
                optimizer.state[params[index]][name] = one
        train(optimizer, params, 4, first=10)
    ours, params = worlds[0]
    assert ours.state[params[0]][name] is ours.state[params[4]][name]
    assert_alike(*worlds)


SGD = {"lr": 0.02, "momentum": 0.8, "dampening": 0.3}  # counts no steps; the first one is another


@pytest.mark.parametrize(
    "makes",
    [(PagedNAdam, theirs), (functools.partial(PagedSGD, **SGD), functools.partial(torch.optim.SGD, **SGD))],
    ids=["nadam", "sgd"],
)
def test_a_parameter_that_stands_twice(makes: tuple[Callable[[Params], Any], ...]) -> None:
    worlds = []
    for make in makes:
        params = parameters()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = make([params[0], params[1], params[0]])
        optimizer.add_param_group({"params": params[2:], "lr": 0.07})
        optimizer.param_groups[1]["params"].append(params[1])  # whose state the first group makes, in torch
        train(optimizer, params, 9)
        worlds.append(World(optimizer, params))
    ours, params = worlds[0]
    assert float(ours.state[params[0]].get("step", 10)) > 9
    assert_alike(*worlds)


def test_a_late_joiner_starts_with_the_first_value() -> None:
    worlds = both()
    for optimizer, params in worlds:
        steps(optimizer, params, 3)
        params.append(parameters()[1])
        optimizer.add_param_group({"params": params[-1:]})
        steps(optimizer, params, 3, first=3)
    assert_alike(*worlds)


def test_without_a_step_count_it_is_made_where_it_is_missing() -> None:
    mine, other = made(Uncounted), made()
    ours, params = mine
    steps(ours, params, 1)
    steps(*other, 1)
    assert list(ours.state[params[0]]) == ["mu_product", "exp_avg", "exp_avg_sq"]
    assert same(params, other.params)
    assert mine.numbers() == other.numbers()
    first = mine.numbers()[0]
    del ours.state[params[0]]["mu_product"]
    steps(ours, params, 1, first=1)
    assert 0 < mine.numbers()[1] < mine.numbers()[0] < 1
    assert mine.numbers()[0] == pytest.approx(first, rel=0.01)


def test_steps_that_no_state_holds_are_counted_where_there_is_a_gradient() -> None:
    worlds = made(Uncounted), made()
    for optimizer, params in worlds:
        steps(optimizer, params, 2)
        for step in range(2):
            params[1 + step].grad = None
            optimizer.step()
        steps(optimizer, params, 2, first=2)
    assert same(worlds[0].params, worlds[1].params)


class Undeclared(PagedNAdam):
    """It chooses its rule, and does not say among which."""

    def rule_of(self, group: dict[str, Any]) -> pagedopt.Rule:
        return nadam


class Declared(Undeclared):
    """It does."""

    rules = (nadam,)


def test_who_chooses_rules_that_change_numbers_says_among_which() -> None:
    with pytest.raises(TypeError, match=r"'nadam' changes mu_product: Undeclared, .*'rules'"):
        steps(*made(Undeclared), 1)
    steps(*made(Declared), 1)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "missing": (lambda entry: entry.pop("mu_product"), KeyError, "mu_product"),
    "two elements": (_replace(torch.ones(2)), RuntimeError, r"'mu_product' of parameter 1 .*must be a tensor of one"),
    "float": (_replace(0.5), RuntimeError, r"'mu_product' of parameter 1 .*is float; it must be"),
    "None": (_replace(None), RuntimeError, r"'mu_product' of parameter 1 .*is NoneType; it must be"),
    "complex": (_replace(torch.tensor(1j)), RuntimeError, r"'mu_product' of parameter 1 .*is torch.complex64"),
}


@pytest.mark.parametrize(("edit", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_number_is_refused(edit: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    ours, params = made()
    steps(ours, params, 2)
    kept = edit(ours.state[params[1]])
    before = [*(p.detach().clone() for p in params), ours.state[params[0]]["mu_product"].clone()]
    with pytest.raises(error, match=text):
        steps(ours, params, 1, first=2)
    assert same([*params, ours.state[params[0]]["mu_product"]], before)
    ours.state[params[1]]["mu_product"] = kept if isinstance(kept, torch.Tensor) else torch.tensor(0.9)
    steps(ours, params, 1, first=2)


def test_a_step_that_fails_before_its_launch_changes_no_number() -> None:
    ours, params = made()
    steps(ours, params, 2)
    before = [(float(e["step"]), float(e["mu_product"])) for e in ours.state.values()]
    ours.param_groups[1]["momentum_decay"] = -1e9  # a power of it is beyond double
    with pytest.raises(OverflowError):
        steps(ours, params, 1, first=2)
    assert [(float(e["step"]), float(e["mu_product"])) for e in ours.state.values()] == before
    fresh = made(momentum_decay=-1e9)
    with pytest.raises(OverflowError):
        steps(*fresh, 1)
    assert not fresh.optimizer.state


LOADED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda entry: entry.pop("mu_product"), "parameter 2 has no mu_product"),
    "two elements": (_replace(torch.ones(2)), r"loaded mu_product of parameter 2 is a tensor of .*not a number"),
    "text": (_replace("1"), "loaded mu_product of parameter 2 is '1', not a number"),
}


@pytest.mark.parametrize(("edit", "text"), LOADED.values(), ids=LOADED)
def test_a_checkpoint_without_a_number_is_refused(edit: Callable[[Any], Any], text: str) -> None:
    (ours, params), other = both()
    steps(ours, params, 1)
    steps(*other, 3)
    saved = copy.deepcopy(other.optimizer.state_dict())
    edit(saved["state"][2])
    with pytest.raises(ValueError, match=text):
        ours.load_state_dict(saved)
    assert float(ours.state[params[0]]["step"]) == 1


def test_a_number_that_is_loaded_as_such_becomes_a_tensor() -> None:
    ours, other = both()
    steps(*other, 3)
    saved = copy.deepcopy(other.optimizer.state_dict())
    for entry in saved["state"].values():
        entry["mu_product"] = float(entry["mu_product"])
    ours.optimizer.load_state_dict(saved)
    assert all(isinstance(ours.optimizer.state[p]["mu_product"], torch.Tensor) for p in ours.params)
    assert ours.numbers() == other.numbers()
