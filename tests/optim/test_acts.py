"""What a step uses is what ``optimizer.state``, ``optimizer.param_groups`` and gradients hold now; torch decides."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from forks import in_child
from gpu_support import DEVICES
from often import MARKS, long_but
from optim_support import same, stepped
from support import F32, F64, default_dtype
from torch.nn import Parameter

from pagedopt import PagedAdamW
from tests.acts import (
    BEFORE,
    FLAGS,
    GROUPS,
    NORMS,
    OUTSIDE,
    RESETS,
    STATE,
    absent,
    acts_of,
    add_group,
    each_entry,
)
from tests.loads import HOME, LOADED, MOVES
from tests.specs import BY_STATE, CASES, Case
from tests.world import (
    HALF,
    INT8,
    LENIENT,
    PYTHON,
    QUICK,
    RESIDENT,
    SIDES,
    SPILLED,
    Side,
    World,
    Worlds,
    assert_refused,
    groups_of,
    one_group,
    parameters,
    record,
    steps,
)  # fmt: skip

#: Acts that change no tensor of state: where state lies does not matter to them.
PLAIN = {name for acts in FLAGS.values() for name in acts}
#: What amsgrad and Lion add to what AdamW and SGD show.
OWN: dict[str, tuple[str, ...]] = {
    "amsgrad": ("max_", "amsgrad"),
    "lion": ("clones", "prune", "deepcopy", "load a copy"),
}
#: Acts that are for SGD what they are for AdamW, but for some of them.
COMMON = {*GROUPS, *RESETS, *LOADED} - {"prune", "add_param_group", "exchange"}


#: Parts of the names of acts that go through a state dict, and of those that these do not go with: a load refuses to
#: round, and a parameter that stands twice; it casts counts as torch does not; what changes a dict knows its own alone.
LOADS = ("load", "new one", "deepcopy", "pickle", "state dict")
ODD = ("64", "16", "element", "number", "integer", "numpy", "shape", "twice", "in two groups", "load ", "counts",
       "torch's")  # fmt: skip


def is_often(name: str, act: str) -> bool:
    """Every act of AdamW is, and of SGD what has to do with its state; of the others, what is their own."""
    return act.startswith(OWN.get(name, "")) and not (name == "momentum" and act in COMMON)


#: Clipping knows no rule.
ACTS = [
    pytest.param(name, act, clip, id=f"{name}-{act}{'-clipped' * bool(clip)}", marks=MARKS[often])
    for name in BY_STATE
    for i, act in enumerate(acts_of(name))
    for clip, often in ((None, is_often(name, act)), (0.5, i % 6 == 0))
    if not (clip and (name != "adamw" or ("float16" in act and "cast" in act)))  # torch adds squares of 16 bits in 16
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "act", "clip"), ACTS)
def test_an_act_and_the_same_again(name: str, act: str, clip: float | None, device: str) -> None:
    half = name == "adamw" and act not in PLAIN and not act.startswith("step: ")
    worlds = Worlds(BY_STATE[name], *SIDES[: 4 if half else 3], device=device, clip=clip).step(4)
    assert [record(world.optimizer) is not None for world in worlds.ours[:2]] == [QUICK, False]
    for _ in range(2):
        worlds.do(acts_of(name)[act], act).step(4)


@pytest.mark.parametrize("act", RESETS)
def test_a_reset_wherever_state_is(act: str) -> None:
    others = (Side(str(options), options) for options in ({"preallocate": True}, {"placement": "host"}))
    worlds = Worlds(CASES["adamw"], *SIDES, *others).step(3).do(RESETS[act]).step(3).do(RESETS[act])
    assert not worlds.do(RESETS[act]).step(2).over
    assert len({vars(world.optimizer).get("mine") for world in worlds.each()}) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act", MOVES)
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_state_in_8_bits_is_loaded_moved_and_copied(name: str, act: str, device: str) -> None:
    worlds = Worlds(BY_STATE[name], *INT8, device=device).step(3)
    for _ in range(2):
        worlds.do(MOVES[act]).step(2)
    assert worlds.over == (act == "a new one by way of torch"), "torch casts codes to float32"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", long_but(range(400), range(24).__contains__))
def test_acts_follow_each_other(seed: int, device: str) -> None:
    """Six in a row, of any kind; one that has nothing left to act on clears the state."""
    chance = random.Random(seed)
    name, clip = list(BY_STATE)[seed % len(BY_STATE)], 0.5 if seed % 5 < 2 else None
    sides = INT8 if seed % 3 == 2 and BY_STATE[name].in_8_bits else SIDES
    worlds = Worlds(BY_STATE[name], *sides, device=device, clip=clip).step(4)
    left_out = LOADS if seed % 2 else ODD
    found = [act for act in acts_of(name) if act not in LENIENT and not act.startswith("no ")] + [*NORMS] * 4
    found = [act for act in found if not any(part in act for part in left_out)]
    for act in chance.choices(found, k=6):
        worlds.do({**acts_of(name), **NORMS}[act], act, clear=True).step(chance.randrange(1, 5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("clip", "groups"),
    [
        pytest.param(clip, groups, marks=MARKS[(clip is None) == (groups is groups_of)])
        for clip in (None, 0.5)
        for groups in (groups_of, one_group)
    ],
)
@pytest.mark.parametrize("what", BEFORE)
def test_what_changes_in_front_of_each_step(what: str, groups: Any, clip: float | None, device: str) -> None:
    act, fewest = BEFORE[what]
    worlds = Worlds(CASES["adamw"], *SIDES, device=device, groups=groups, clip=clip).step(12, act)
    assert worlds.ours[0].quick >= (fewest or 0) * QUICK
    assert fewest != 0 or worlds.ours[0].quick == 0
    assert not worlds.over


@pytest.mark.parametrize("device", DEVICES)
def test_which_gradient_is_absent_may_change_from_step_to_step(device: str) -> None:
    """As many as before are there, in the same shapes, and of other parameters."""
    which = absent(lambda step: {step * 2 % 3, (step + 1) % 3 if step % 4 == 3 else step * 2 % 3})
    three = lambda device: [torch.full((5,), i + 1.0, device=device) for i in range(3)]  # noqa: E731
    worlds = Worlds(CASES["adamw"], *SIDES[:3], device=device, make=three, groups=one_group).step(12, which)
    assert not worlds.over


def test_patience_doubles_while_gradients_come_and_go() -> None:
    """A record that does not last is not made again and again."""

    def act(world: World) -> None:
        BEFORE["one comes and goes"][0](world)
        world.alive.append(world.ours and record(world.optimizer))

    ours = Worlds(CASES["adamw"], RESIDENT, PYTHON).step(40, act).ours[0]
    assert len({id(each) for each in ours.alive}) <= 7


#: With torch's defaults, and two switches at once.
MORE = [
    *(dataclasses.replace(CASES[name], name=f"{name} by default", options={}) for name in ("adamw", "lion")),
    dataclasses.replace(CASES["sgd"], name="sgd by default", options={"lr": 0.05}),
    dataclasses.replace(CASES["amsgrad"], name="both", options={**CASES["amsgrad"].options, "maximize": True}),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case}-{dtype}", marks=MARKS[dtype == F32 or case in BY_STATE.values()])
        for case in (*CASES.values(), *MORE)
        for dtype in (F32, F64)
    ],
)
def test_forty_steps(case: Case, dtype: torch.dtype) -> None:
    assert not Worlds(case, *SIDES, dtypes=(dtype,)).step(40).over


MIXED = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "sides"),
    [
        pytest.param(case, sides, id=f"{case}-{name}", marks=MARKS[sides is SIDES or case in BY_STATE.values()])
        for case in CASES.values()
        for name, sides in (("plain", SIDES), ("int8", INT8))
    ],
)
def test_parameters_of_several_dtypes(case: Case, sides: Any, device: str) -> None:
    ours = Worlds(case, *sides, dtypes=MIXED, device=device).step(9).ours[0]
    assert ours.quick >= 4 * QUICK


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "clip"),
    [("adamw", None), ("adamw", 0.5), pytest.param("lion", None, marks=pytest.mark.long)],  # of same numbers
)
def test_many_steps_in_flight(name: str, clip: float | None, device: str) -> None:
    """More steps than there are buffers for tables, each with gradients elsewhere, and none is waited for."""
    many = lambda device: [torch.ones(2, 3, device=device)] * 20  # noqa: E731
    sides = Worlds(CASES[name], RESIDENT, PYTHON, device=device, make=many, groups=one_group, clip=clip)
    sides.step(60, lambda world: world.alive.append([p.grad for p in world.params]))
    assert sides.ours[0].quick >= 50 * QUICK


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_other_step_is_on_another_stream() -> None:
    def act(world: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            world.take()
        torch.cuda.current_stream().wait_stream(stream)

    assert not Worlds(CASES["adamw"], *SIDES, device="cuda").step(16, act).over


def test_what_goes_wrong_by_itself_is_no_refusal() -> None:
    """Where torch refuses, too: an error that a line of ours does not raise is a slip."""
    world, slip = World(CASES["adamw"], RESIDENT), AttributeError("'float' object has no attribute 'dtype'")
    with pytest.raises(AssertionError, match="just went wrong"):
        assert_refused(world, slip, slip, world.snapshot())


def test_an_act_that_one_side_alone_refuses_is_no_act() -> None:
    with pytest.raises(AssertionError, match="not all sides raise"):
        Worlds(CASES["adamw"], RESIDENT).do(lambda world: world.ours and 1 / 0)


# --- where state is, and what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_STATE)
def test_resident_state_is_reported_to_the_byte(name: str) -> None:
    worlds = Worlds(BY_STATE[name], RESIDENT).step(2)
    for act in ("one entry of clones", "prune", "clones"):
        report = worlds.ours[0].optimizer.memory_report()
        state = sum(t.nbytes for (_, name), t in worlds.ours[0].tensors().items() if name != "step")
        assert report.by_place == report.measured == {"host": state}
        worlds.do(acts_of(name)[act]).step(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOME)
@pytest.mark.parametrize("act", OUTSIDE)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_state_outside_of_the_budget_is_told_once_until_it_is_home(name: str, act: str, how: str, device: str) -> None:
    here, away = ("host", "file") if device == "cpu" else ("device", "host")
    worlds = Worlds(BY_STATE[name], RESIDENT, SPILLED, device=device).step(2).do(acts_of(name)[act]).step(4)
    spilled = worlds.ours[1]
    assert [len(world.warned) for world in worlds.ours] == [0, 1]
    assert spilled.optimizer.memory_report().by_place.get(here, 0) > 0
    worlds.do(HOME[how])
    state = sum(t.nbytes for (_, name), t in spilled.tensors().items() if name != "step")
    assert spilled.optimizer.memory_report().by_place[away] >= state
    worlds.step(2)
    assert spilled.optimizer.memory_report().by_place.get(here, 0) == 0
    assert len(spilled.warned) == 1


@pytest.mark.parametrize("replaced", [0, 1])
def test_one_parameter_s_pages_stay_and_the_other_s_state_is_the_user_s(replaced: int) -> None:
    """The first lies in a resident page alone, the second in that one and in pages that are away."""
    two = lambda device: parameters(device)[1::-1]  # noqa: E731
    worlds = Worlds(CASES["adamw"], RESIDENT, HALF, make=two, groups=one_group).step(2)
    assert not worlds.do(each_entry(torch.clone, only=replaced)).step(2).over


@default_dtype(torch.float64)
def test_counts_are_of_torch_s_dtype_under_default_float64() -> None:
    """A late parameter gets its count after the default has changed."""
    worlds = Worlds(CASES["adamw"], *SIDES).step(2)
    with default_dtype(torch.float32):
        worlds.do(add_group).step(2)
    ours = worlds.ours[0]
    assert [ours.state[ours.params[i]]["step"].dtype for i in (0, -1)] == [torch.float64, torch.float32]


def test_counts_stay_the_objects_that_they_are() -> None:
    """A group that joins makes no new count for the others."""
    worlds = Worlds(CASES["adamw"], *SIDES).step(2)
    held = [world.state[world.params[0]]["step"] for world in worlds.ours]
    worlds.do(add_group).step(2)
    assert all(world.state[world.params[0]]["step"] is count for world, count in zip(worlds.ours, held, strict=True))
    assert [float(count) for count in held] == [4] * len(held)


def test_a_moment_without_memory_is_refused() -> None:
    """As after FSDP's ``storage.resize_(0)``: what torch writes to then is nobody's."""
    for world in Worlds(CASES["adamw"], *SIDES).step(2).do(STATE["one entry of clones"]).step(1).ours:
        start = [p.detach().clone() for p in world.params]
        world.state[world.params[1]]["exp_avg"].untyped_storage().resize_(0)
        assert isinstance(world.step(), (RuntimeError, ValueError))
        assert same(start, world.params)


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
    with pytest.warns(RuntimeWarning, match="are in tensors outside of the pages") as seen:
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
    ours = functools.partial(PagedAdamW, device_budget=budget, state_format=state_format)
    for kind in (torch.optim.AdamW, ours):
        flat = torch.ones(400_000)
        p = Parameter(flat[:200_000])
        optimizer = kind([p], lr=0.1)
        for count in (200_000, 100_000, 100_000):
            p.grad, p.data = None, flat[:count]
            for name in set(optimizer.state[p]) - {"step"}:
                optimizer.state[p][name] = optimizer.state[p][name][:count]
            p.grad, behind = torch.ones_like(p), flat[count:].clone()
            optimizer.step()
            assert torch.equal(flat[count:], behind)
        results.append(flat)
    torch.testing.assert_close(*results, rtol=1e-2 if state_format else 1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("side", [RESIDENT, SPILLED, HALF], ids=lambda side: side.name)
def test_replacing_all_state_leaves_no_device_memory_behind(side: Any) -> None:
    worlds, used = Worlds(CASES["adamw"], side, device="cuda").step(2), []
    for _ in range(22):
        worlds.do(STATE["clones"]).step(1)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert max(used[1:]) <= 1.05 * used[1]
