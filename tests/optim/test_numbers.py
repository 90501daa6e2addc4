"""Numbers that a parameter has for itself; and a format of blocks: its seed, whole blocks in pages, stretches."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats_under_test import WhereItStands
from optim_support import same, stepped
from support import default_dtype

import pagedopt
from pagedopt import PagedAdamW, PagedNAdam
from pagedopt.optim import columns as encoding
from pagedopt.rules.nadam import nadam
from tests.acts import GROUPS, absent
from tests.loads import MOVES
from tests.outside.format import Int8Blocks
from tests.specs import CASES, Case
from tests.world import SIDES, Act, Params, World, Worlds, groups_of, parameters, steps

FORM = Int8Blocks()
pytestmark = pytest.mark.usefixtures("folder")


def test_the_seed_is_each_parameter_s_step_and_goes_on_with_a_checkpoint() -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (70, 3, 130)]
    formats: dict[str, Any] = {"exp_avg": WhereItStands()}

    def step(opt: PagedAdamW, absent: int) -> None:
        for i, p in enumerate(params):
            p.grad = None if i == absent else torch.ones_like(p)
        opt.step()

    opt = PagedAdamW(params, state_format=formats)
    for gone in (1, 2, 1):
        step(opt, gone)
    other = PagedAdamW(params, state_format=formats)
    other.load_state_dict(opt.state_dict())
    for taken, each in ((opt, (3, 1, 2)), (other, (4, 2, 3))):
        if taken is other:
            step(other, -1)
        for i, (p, count) in enumerate(zip(params, each, strict=True)):
            assert float(taken.state[p]["step"]) == count
            assert taken.state[p]["exp_avg.drawn"].tolist() == [count] * p.numel()
            assert taken.state[p]["exp_avg.number"].tolist() == list(range(p.numel()))
            assert taken.state[p]["exp_avg.parameter"].unique().numel() == 1, i


def test_pages_are_cut_on_blocks() -> None:
    _, opt = stepped(1000, state_format=FORM, device_budget=0)
    assert [arena.layout.block for arena in opt.store.arenas] == [FORM.block]


@pytest.mark.parametrize("numel", [64, 1000, 64 * 9])
def test_what_is_converted_in_stretches_is_as_if_converted_at_once(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.randn(4, numel // 4).t()
    values = torch.randn(p.shape)
    store = PagedAdamW([torch.nn.Parameter(torch.ones(1))]).store

    def columns() -> list[torch.Tensor]:
        return [c.like(p) if c.per == 1 else torch.empty(c.shape(p)) for c in FORM.columns]

    results = []
    for stretch in (1 << 20, 128):
        monkeypatch.setattr(encoding, "STRETCH", stretch)
        made = [torch.zeros_like(t, dtype=c.dtype) for t, c in zip(columns(), FORM.columns, strict=True)]
        encoding.encode(FORM, made, values, p, store)
        results.append([*made, encoding.decode(FORM, made, p)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.testing.assert_close(results[0][-1], values, rtol=0, atol=float(values.abs().max()) / 250)


def test_state_of_another_dtype_keeps_it_when_it_comes_home_and_in_copies() -> None:
    p = torch.nn.Parameter(torch.ones(1000))
    p.grad = torch.rand(1000)
    opt = PagedAdamW([p], device_budget=0)
    opt.step()
    opt.state[p]["exp_avg_sq"] = opt.state[p]["exp_avg_sq"].double()
    want = {name: value.clone() for name, value in opt.state[p].items()}
    opt.set_device_budget("1MiB")
    copied = copy.deepcopy(opt)
    (twin,) = copied.param_groups[0]["params"]
    for state, store in ((opt.state[p], opt.store), (copied.state[twin], copied.store)):
        assert not any(store.is_outside_arenas(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        assert all(state[name].dtype is value.dtype and torch.equal(state[name], value) for name, value in want.items())


# --- numbers that each parameter has for itself beside ``step``: torch's NAdam ----------------------------------------


NADAM = CASES["nadam"]


class Uncounted(PagedNAdam):
    """Its state holds no steps."""

    has_step = False


UNCOUNTED = dataclasses.replace(NADAM, ours=Uncounted)


def made(case: Case = NADAM, **how: Any) -> tuple[Any, Params]:
    params = parameters()
    return case.make(False, groups_of(params), **how), params


def come_and_go(world: World) -> None:
    """Now and then one has no gradient (the last one none at first); the second group's lr changes on the way."""
    if world.count % 3 == 1:
        world.params[world.count % 4].grad = None
    if world.count < 7:
        world.params[-1].grad = None
    if world.count == 9:
        world.groups[1]["lr"] = 0.01


def _between_words(value: float) -> torch.Tensor:
    """At an address that is no multiple of its size."""
    return torch.frombuffer(bytearray(6), dtype=torch.float32, offset=2, count=1).view(()).fill_(value)


def numbers_of(change: Callable[[torch.Tensor], Any], *only: int) -> Act:
    """Another ``mu_product``, of some or of all."""
    return lambda w: [w.state[w.params[i]].update(mu_product=change(w.state[w.params[i]]["mu_product"])) for i in only]


def shared(name: str, values: tuple[float, float]) -> Act:
    """One number for several parameters: as in torch's loop each takes what the one before it has left."""

    def act(w: World) -> None:
        for value, indices in zip(values, ((0, 2, 4), (1, 3)), strict=True):
            one = torch.tensor(value)
            for index in indices:
                w.state[w.params[index]][name] = one

    return act


VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "filled": lambda t: t.fill_(0.3),
    "float64": lambda t: torch.tensor(0.3, dtype=torch.float64),
    "one dimension": lambda t: torch.tensor([0.3]),
    "of a larger": lambda t: torch.full((5,), 0.3)[3],
    "between words": lambda t: _between_words(0.3),
}
ACTS: dict[str, Act] = {
    **MOVES,
    **{name: GROUPS[name] for name in ("add_param_group", "twice in one list", "in two groups", "move")},
    **{f"all {name}": numbers_of(value, *range(6)) for name, value in VALUES.items()},
    **{f"one {name}": numbers_of(value, 1) for name, value in VALUES.items()},
    "one number for several": shared("mu_product", (0.9, 0.6)),
    "one count for several": shared("step", (9.0, 3.0)),
}


@pytest.mark.parametrize("act", ACTS)
def test_nadam_is_torch_s_whatever_is_done(act: str) -> None:
    worlds = Worlds(NADAM, *SIDES).step(8, come_and_go).do(ACTS[act]).step(6, come_and_go)
    if act.endswith("for several"):
        entries = [worlds.ours[0].state[worlds.ours[0].params[i]] for i in (0, 4)]
        assert any(entries[0][name] is entries[1][name] for name in ("step", "mu_product"))
    assert not worlds.over


@default_dtype(torch.float64)
def test_it_has_the_dtype_of_step_counts() -> None:
    ours = Worlds(NADAM, *SIDES).step(4).ours[0]
    assert ours.state[ours.params[0]]["mu_product"].dtype is torch.float64


@pytest.mark.parametrize("name", ["twice in one list", "in two groups"])
def test_a_parameter_that_stands_twice_and_counts_no_steps(name: str) -> None:
    """The first step of SGD with momentum is another; whoever comes first makes the state."""
    worlds = Worlds(CASES["momentum"], *SIDES).do(GROUPS[name]).step(9, come_and_go)
    assert not worlds.over


def test_steps_that_no_state_holds_are_counted_where_there_is_a_gradient() -> None:
    worlds = [Worlds(dataclasses.replace(case, theirs=None), *SIDES) for case in (NADAM, UNCOUNTED)]
    away = absent(lambda step: {2: (1,), 3: (1, 2)}.get(step, ()))
    one, other = (each.step(6, away).ours[0].params for each in worlds)
    assert same(one, other)


def test_it_costs_no_budget() -> None:
    ours, params = made(device_budget=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(ours, params, 8)
        ours.state[params[0]]["mu_product"] = torch.tensor(0.5)
        steps(ours, params, 2, first=8)
    held = sum(t.nbytes for e in ours.state.values() for n, t in e.items() if n not in ("step", "mu_product"))
    before = ours.memory_report().by_place
    ours.state[params[0]]["mu_product"] = torch.tensor(0.5, dtype=torch.float64)
    assert sum(before.values()) >= held
    assert ours.memory_report().by_place == before


def _replace(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry.update(mu_product=copy.deepcopy(value))


def test_zeros_of_both_signs_stay_apart() -> None:
    ours, params = made()
    steps(ours, params, 1)
    for p in params:
        ours.state[p]["mu_product"].zero_()
    steps(ours, params, 1, first=1)
    ours.state[params[1]]["mu_product"].fill_(-0.0)
    steps(ours, params, 1, first=2)
    assert [p for p in params if ours.state[p]["mu_product"].signbit()] == [params[1]]


def test_without_a_step_count_it_is_made_where_it_is_missing() -> None:
    ours, params = made(UNCOUNTED)
    steps(ours, params, 1)
    first = ours.state[params[0]]
    assert list(first) == ["mu_product", "exp_avg", "exp_avg_sq"]
    before = first.pop("mu_product")
    steps(ours, params, 1, first=1)
    assert 0 < ours.state[params[1]]["mu_product"] < first["mu_product"] < 1
    assert first["mu_product"].item() == pytest.approx(before.item(), rel=0.01)


class Undeclared(PagedNAdam):
    """A user's, which chooses its rule, and does not say among which."""

    rules = ()

    def rule_of(self, group: dict[str, Any]) -> pagedopt.Rule:
        return nadam


class Declared(Undeclared):
    """It does."""

    rules = (nadam,)


def test_who_chooses_rules_that_change_numbers_says_among_which() -> None:
    with pytest.raises(TypeError, match=r"'nadam' changes mu_product: Undeclared, .*'rules'"):
        steps(*made(dataclasses.replace(NADAM, ours=Undeclared)), 1)
    assert not Worlds(dataclasses.replace(NADAM, ours=Declared), *SIDES).step(8, come_and_go).over


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
    fresh, params = made()
    fresh.param_groups[0]["momentum_decay"] = -1e9
    with pytest.raises(OverflowError):
        steps(fresh, params, 1)
    assert not fresh.state


LOADED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda entry: entry.pop("mu_product"), "parameter 2 has no mu_product"),
    "two elements": (_replace(torch.ones(2)), r"loaded mu_product of parameter 2 is a tensor of .*not a number"),
    "text": (_replace("1"), "loaded mu_product of parameter 2 is '1', not a number"),
}


@pytest.mark.parametrize(("edit", "text"), LOADED.values(), ids=LOADED)
def test_a_checkpoint_without_a_number_is_refused(edit: Callable[[Any], Any], text: str) -> None:
    (ours, params), others = made(), parameters()
    other = NADAM.make(True, groups_of(others))
    steps(ours, params, 1)
    steps(other, others, 3)
    saved = copy.deepcopy(other.state_dict())
    edit(saved["state"][2])
    with pytest.raises(ValueError, match=text):
        ours.load_state_dict(saved)
    assert float(ours.state[params[0]]["step"]) == 1
