"""What a step uses is what ``optimizer.state`` and ``optimizer.param_groups`` hold now; torch's optimizer decides."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_support import in_child
from edits import STATE_EDITS, Edit, each_entry, groups_of, moments, parameters, steps
from edits_check import LENIENT, PLACEMENTS, World, assert_same, edits_for, parametrized, run, same_outcome, worlds
from often import long_but
from optim_support import same, stepped
from stand_ins import raising
from support import default_dtype

from pagedopt import PagedAdamW
from pagedopt.optim import gather as members
from tests.optim.edits_groups import GROUP_EDITS, add_group
from tests.optim.specs import BY_STATE as CASES

#: Edits that put all or some state where no budget covers it.
OUTSIDE = ("clones", "the large entry of clones", "offload", "update", "offload .data", "prune the large")


@parametrized()
def test_an_edit_does_what_it_does_in_torch(case: str, edit: str, placement: str) -> None:
    chosen = CASES[case]
    run(chosen, placement, [(edit, edits_for(chosen)[edit])])


def test_what_goes_wrong_by_itself_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch refuses, too: an error that a line of ours does not raise is a slip."""
    ours, theirs = worlds(CASES["adamw"], "resident", steps=2)
    for world in (ours, theirs):
        edits_for(CASES["adamw"])["exp_avg: number"](world.optimizer, world.params)
    monkeypatch.setattr(members, "_check", raising(AttributeError("'float' object has no attribute 'dtype'")))
    with pytest.raises(AssertionError, match="just went wrong"):
        same_outcome(ours, theirs, "exp_avg: number", 2)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "edit", ["clear", "clones", "offload", "offload .data", "append", "reorder", "prune", "densify"]
)
def test_an_edit_may_be_made_again(edit: str, placement: str) -> None:
    found: Edit = {**STATE_EDITS, **GROUP_EDITS, "reorder": GROUP_EDITS["groups reordered"]}[edit]
    run(CASES["adamw"], placement, [(edit, found)] * 3)


@pytest.mark.parametrize("seed", long_but(range(300), range(12).__contains__))
def test_edits_follow_each_other(seed: int) -> None:
    """Four edits in a row, of any kind; the row ends where one has nothing left to edit, or where torch refuses."""
    chance = random.Random(seed)
    case = CASES[list(CASES)[seed % len(CASES)]]
    followed = [(name, edit) for name, edit in edits_for(case).items() if name not in LENIENT and name[:3] != "no "]
    chosen = chance.sample(followed, 4)

    def unless_gone(name: str, edit: Edit) -> tuple[str, Edit]:
        def apply(optimizer: torch.optim.Optimizer, params: Any) -> None:
            try:
                edit(optimizer, params)
            except Exception:
                optimizer.state.clear()

        return name, apply

    run(case, PLACEMENTS[seed // len(CASES) % 3], [unless_gone(name, edit) for name, edit in chosen])


@pytest.mark.parametrize("name", CASES)
def test_resident_state_is_reported_to_the_byte(name: str) -> None:
    ours, _ = worlds(CASES[name], "resident", steps=2)
    for edit in ("one entry of clones", "prune", "clones"):
        report = ours.optimizer.memory_report()
        assert report.by_place == {"host": sum(t.nbytes for (_, n), t in ours.tensors().items() if n != "step")}
        assert report.measured == report.by_place
        edits_for(CASES[name])[edit](ours.optimizer, ours.params)
        assert ours.attempt(1, 2) is None


@pytest.mark.parametrize("edit", OUTSIDE)
@pytest.mark.parametrize("name", CASES)
def test_state_outside_of_the_budget_is_told_once(name: str, edit: str) -> None:
    for placement, expected in (("spilled", 1), ("resident", 0)):
        ours, _ = worlds(CASES[name], placement, steps=2)
        assert ours.warned == []
        edits_for(CASES[name])[edit](ours.optimizer, ours.params)
        for step in range(2, 6):
            assert ours.attempt(1, step) is None
        assert len(ours.warned) == expected, ours.warned


HOME: dict[str, Callable[[Any], None]] = {
    "budget": lambda opt: opt.set_device_budget(0),
    "load": lambda opt: opt.load_state_dict(opt.state_dict()),
    "load a copy": lambda opt: opt.load_state_dict(copy.deepcopy(opt.state_dict())),
}


@pytest.mark.parametrize("how", HOME)
@pytest.mark.parametrize("edit", OUTSIDE)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_budget_and_loading_bring_state_home(name: str, edit: str, how: str) -> None:
    ours, theirs = worlds(CASES[name], "spilled", steps=2)
    for world in (ours, theirs):
        edits_for(CASES[name])[edit](world.optimizer, world.params)
        assert world.attempt(2, 2) is None
    assert ours.optimizer.memory_report().by_place.get("host", 0) > 0
    ours.warned.clear()
    HOME[how](ours.optimizer)
    report = ours.optimizer.memory_report()
    assert report.by_place.get("host", 0) == 0
    assert report.by_place["file"] >= sum(t.nbytes for (_, n), t in ours.tensors().items() if n != "step")
    assert ours.attempt(2, 4) is None is theirs.attempt(2, 4)
    assert_same(ours, theirs)
    assert ours.warned == []
    assert ours.optimizer.memory_report().by_place.get("host", 0) == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pages_move_beside_state_of_the_user(placement: str) -> None:
    """Spill, unspill and other budgets while some state is the user's."""
    ours, theirs = worlds(CASES["adamw"], placement, steps=2)
    for world in (ours, theirs):
        each_entry(world.optimizer, world.params, torch.clone, only=1)
        assert world.attempt(1, 2) is None
    mine = ours.optimizer
    moves = [mine.spill, mine.unspill]
    if placement != "resident":
        moves += [lambda: mine.set_device_budget(None), lambda: mine.set_device_budget("100kB")]
    for step, move in enumerate(moves, 3):
        move()
        assert ours.attempt(1, step) is None is theirs.attempt(1, step)
        assert_same(ours, theirs)


@pytest.mark.parametrize("replaced", [0, 1])
def test_one_parameter_s_pages_stay_and_the_other_s_state_is_the_user_s(replaced: int) -> None:
    """The first lies in a resident page alone, the second in that one and in pages that are away."""
    case = CASES["adamw"]
    made = []
    for theirs in (False, True):
        params = parameters()[1::-1]
        how = {} if theirs else {"device_budget": 160_000}
        made.append(World(case.make(theirs, [{"params": params}], **how), params))
        assert made[-1].attempt(2, 0) is None
        each_entry(made[-1].optimizer, params, torch.clone, only=replaced)
        assert made[-1].attempt(2, 2) is None
    assert_same(*made)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("copied", ["deepcopy", "state_dict"])
def test_copies_have_what_the_user_put(copied: str, placement: str) -> None:
    case = CASES["adamw"]
    ours, theirs = worlds(case, placement, steps=2)
    for world in (ours, theirs):
        edits_for(case)["one entry of clones"](world.optimizer, world.params)
        edits_for(case)["in place"](world.optimizer, world.params)
    if copied == "deepcopy":
        other = World(*copy.deepcopy((ours.optimizer, ours.params)))
    else:
        params = copy.deepcopy(ours.params)
        other = World(case.make(False, groups_of(params)), params)
        other.optimizer.load_state_dict(ours.optimizer.state_dict())
    assert other.attempt(2, 2) is None is theirs.attempt(2, 2)
    assert_same(other, theirs)


@default_dtype(torch.float64)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_counts_are_of_torch_s_dtype_under_default_float64(placement: str) -> None:
    """``assert_same`` compares dtypes; a late parameter gets its count after the default has changed."""
    ours, theirs = worlds(CASES["adamw"], placement, steps=2)
    for world in (ours, theirs):
        with default_dtype(torch.float32):
            add_group(world.optimizer, world.params)
            assert world.attempt(2, 2) is None
    assert_same(ours, theirs)
    assert ours.optimizer.state[ours.params[0]]["step"].dtype is torch.float64
    assert ours.optimizer.state[ours.params[-1]]["step"].dtype is torch.float32


def test_counts_stay_the_objects_that_they_are() -> None:
    """A group that joins makes no new count for the others."""
    params = parameters()
    optimizer = CASES["adamw"].make(False, groups_of(params))
    steps(optimizer, params, 2)
    held = optimizer.state[params[0]]["step"]
    add_group(optimizer, params)
    steps(optimizer, params, 2, first=2)
    assert optimizer.state[params[0]]["step"] is held
    assert float(held) == 4


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_moment_without_memory_is_refused(placement: str) -> None:
    """As after FSDP's ``storage.resize_(0)``: what torch writes to then is nobody's."""
    ours, _ = worlds(CASES["adamw"], placement, steps=2)
    entry = ours.optimizer.state[ours.params[1]]
    entry["exp_avg"] = entry["exp_avg"].clone()
    assert ours.attempt(1, 2) is None
    start = [p.detach().clone() for p in ours.params]
    entry["exp_avg"].untyped_storage().resize_(0)
    assert isinstance(ours.attempt(1, 3), (RuntimeError, ValueError))
    assert same(start, ours.params)


@pytest.mark.parametrize("nbytes", [0, 8])
@pytest.mark.parametrize("taken", [1, 5], ids=["once", "again and again"])
def test_a_step_count_without_memory_is_refused(taken: int, nbytes: int) -> None:
    """In a child: torch's own step ends the process."""

    def work() -> tuple[str, bool]:
        params = parameters()
        optimizer = PagedAdamW(params)
        steps(optimizer, params, 1)
        counts = torch.ones(1000)
        for i, p in enumerate(params):
            optimizer.state[p]["step"] = counts[500 + i]
        steps(optimizer, params, taken, first=1)
        start = [p.detach().clone() for p in params]
        counts.untyped_storage().resize_(nbytes)
        with pytest.raises(RuntimeError) as caught:
            steps(optimizer, params, 1, first=9)
        return str(caught.value), same(start, params)

    text, stays = in_child(work)
    assert text.startswith("state 'step' of parameter 0 of shape ")
    assert text.endswith(" has no memory for all of it: its storage was freed or resized")
    assert stays


def test_the_warning_names_the_line_that_made_the_step() -> None:
    p, optimizer = stepped(1000, placement="file", device_budget=0)
    optimizer.state[p]["exp_avg"] = torch.zeros(1000)
    with pytest.warns(RuntimeWarning, match="lie where they were put") as seen:
        optimizer.step()
    assert [warning.filename for warning in seen] == [__file__]


def test_a_name_in_state_that_is_an_object_goes_with_its_optimizer() -> None:
    p, optimizer = stepped()
    name = torch.empty(5)
    optimizer.state[p][name] = "the user's"
    optimizer.step()
    there = weakref.ref(name)
    del optimizer, p, name
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("budget", [None, 0, "50%"])
@pytest.mark.parametrize("state_format", [None, "bfloat16"])
def test_a_parameter_that_has_shrunk_with_its_state_is_updated_and_nothing_behind_it(
    budget: Any, state_format: Any
) -> None:
    """The state is the front of what it was, at the same address: where its pages lie no longer says how long it is."""
    results = []
    for kind, options in (
        (torch.optim.AdamW, {}),
        (PagedAdamW, {"device_budget": budget, "state_format": state_format}),
    ):
        flat = torch.ones(400_000)
        p = torch.nn.Parameter(flat[:200_000])
        optimizer = kind([p], lr=0.1, **options)
        for count in (200_000, 100_000, 100_000):
            p.grad = None
            p.data = flat[:count]
            for name in moments(optimizer, p):
                optimizer.state[p][name] = optimizer.state[p][name][:count]
            p.grad, behind = torch.ones_like(p), flat[count:].clone()
            optimizer.step()
            assert torch.equal(flat[count:], behind)
        results.append(flat)
    torch.testing.assert_close(*results, rtol=1e-2 if state_format else 1e-6, atol=0)
