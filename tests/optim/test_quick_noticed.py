"""What quick steps notice of what else has changed: rules, formats, tables that a step the long way has written."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import DEVICES
from optim_support import params_of
from torch.nn import Parameter

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.rules.sgd import sgd
from pagedopt.system import look as build
from tests.acts import absent, nothing, set_groups
from tests.optim.quick_steps import ROOTED, WARM, compiled, compiled_alone, look, nothing_is_queued, with_hook
from tests.specs import BY_STATE, CASES, Case
from tests.world import (
    INT8,
    PYTHON,
    RESIDENT,
    Act,
    Side,
    World,
    Worlds,
    assert_same_bits,
    give,
    numbers,
    one_group,
    parameters,
    record,
    steps,
)

__all__ = ["look", "nothing_is_queued"]  # fixtures
pytestmark = compiled_alone

ADAMW = CASES["adamw"]


def quick(case: Case = ADAMW, count: int = 6, **how: Any) -> Worlds:
    """Two looks, of which one is compiled, after some steps."""
    worlds = Worlds(case, RESIDENT, PYTHON, **how).step(count)
    assert [record(world.optimizer) is not None for world in worlds.ours] == [True, False]
    return worlds


def test_a_dict_of_formats_that_is_edited() -> None:
    sides = [Side(name, {"state_format": {"exp_avg": "float32"}}, python=name == "python") for name in ("", "python")]
    worlds = Worlds(ADAMW, *sides).step(6)
    worlds.do(lambda world: world.optimizer.state_format.update(exp_avg="bfloat16")).step(1)
    assert not worlds.over


def in_mode(optimizer: Any) -> None:
    with torch.overrides.BaseTorchFunctionMode():
        optimizer.step()


LONG: dict[str, Callable[[Any], object]] = {
    "a closure": lambda optimizer: optimizer.step(lambda: 0),
    "a closure by name": lambda optimizer: optimizer.step(closure=lambda: 0),
    "a hook": with_hook,
    "a function mode": in_mode,
    "torch.compile": lambda optimizer: torch.compile(lambda: optimizer.step(), backend="eager")(),
}


@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("edit", ["absent", "present", "elsewhere", "none"])
def test_a_step_the_long_way_between_may_write_the_table(long: str, edit: str) -> None:
    """The record is of the table as it was: the long step has other rows in it."""
    usual = absent(lambda _: (1,) if edit == "present" else ())

    def between(world: World) -> None:
        memory = world.params[2].data
        give(world.params, 50, skip=(1,) if edit == "absent" else ())
        if edit == "elsewhere":
            world.params[2].data = memory.clone()
        LONG[long](world.optimizer)
        if edit == "elsewhere":
            world.params[2].data = memory

    worlds = Worlds(ADAMW, RESIDENT, PYTHON, groups=one_group).step(5, usual)
    assert record(worlds.ours[0].optimizer)
    if long == "torch.compile":  # a compiled function raises versions as it likes
        for world in worlds.ours:
            between(world)
            assert [world.step(usual) for _ in range(6)] == [None] * 6
        assert all(map(torch.equal, *(world.params for world in worlds.ours)))
    else:
        worlds.do(between).step(6, usual)
    assert record(worlds.ours[0].optimizer)


def test_a_rare_hook_does_not_wear_out_its_patience() -> None:
    world = World(ADAMW, RESIDENT)
    for step in range(200):
        if step % 20 == 10:
            with_hook(world.optimizer)
        else:
            assert world.step() is None
    assert world.quick >= 170


class Slow(PagedSGD):
    """A class whose rule may be set."""


OTHER_RULES: dict[str, Callable[[Any], object]] = {
    "of the object": lambda optimizer: setattr(optimizer, "rule_of", lambda group: sgd),
    "of the class": lambda optimizer: setattr(type(optimizer), "rule_of", lambda self, group: sgd),
}


@pytest.mark.parametrize("how", OTHER_RULES)
def test_another_rule_is_noticed(how: str) -> None:
    """Each side has a class of its own."""

    def own(*arguments: Any, **options: Any) -> Any:
        return type("Own", (Slow,), {})(*arguments, **options)

    own.has_step = False  # type: ignore[attr-defined]
    case = Case(name="own", ours=own, theirs=None, rule="sgd_momentum", options={"lr": 0.1, "momentum": 0.9}, other={})
    worlds = quick(case, 9).do(lambda world: OTHER_RULES[how](world.optimizer)).step(3)
    assert not worlds.over
    buffers = [worlds.ours[0].state[p]["momentum_buffer"] for p in worlds.ours[0].params]
    before = [buffer.clone() for buffer in buffers]
    worlds.step(1)
    assert all(map(torch.equal, buffers, before)), "momentum is not used any more"


def test_counts_whose_memory_goes_are_not_read() -> None:
    params = parameters()
    optimizer = PagedAdamW(params)
    steps(optimizer, params, 1)
    flat = torch.zeros(40 << 20)
    for i, p in enumerate(params):
        optimizer.state[p]["step"] = flat[i + (20 << 20)]
        flat[i + (20 << 20)] = i
    steps(optimizer, params, 5)
    assert record(optimizer)
    flat.share_memory_()
    steps(optimizer, params, 1, first=6)
    assert [optimizer.state[p]["step"].item() for p in params] == [6 + i for i in range(len(params))]


def of_counts(change: Callable[[list[Any]], object]) -> Callable[[World], object]:
    return lambda world: change([world.state[p]["step"] for p in world.params])


def entries(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], None]:
    """Replace each entry of state by another with the same tensors."""
    return lambda world: world.state.update({p: change(dict(entry)) for p, entry in world.state.items()})


def count_last(entry: dict[str, Any]) -> Any:
    found = OrderedDict(entry)
    found.move_to_end("step")
    return found


class Getting(dict[str, Any]):
    """A dict whose items Python code gets."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)


OTHER_DICTS: dict[str, tuple[Callable[[World], object], bool]] = {
    "OrderedDict": (entries(OrderedDict), True),
    "OrderedDict in another order": (entries(count_last), True),
    "defaultdict": (entries(lambda entry: defaultdict(dict, entry)), True),
    "Python code": (entries(Getting), True),
    "no dict": (entries(UserDict), False),
    "state": (lambda world: setattr(world.optimizer, "state", OrderedDict(world.state)), True),
}


@pytest.mark.parametrize("what", OTHER_DICTS)
@pytest.mark.parametrize("count", [2, 6])
def test_state_in_dicts_of_other_classes(what: str, count: int) -> None:
    act, is_one_call = OTHER_DICTS[what]
    worlds = quick(count=9, make=lambda device: parameters(device)[:count], groups=one_group)
    for _ in range(2):
        before = worlds.ours[0].quick
        worlds.do(act).step(9)
        assert (worlds.ours[0].quick - before >= 4) == is_one_call
    assert not worlds.over


STALE: dict[str, Callable[[World], object]] = {
    "groups": set_groups(total=16.0),
    "counts": of_counts(lambda counts: [count.zero_() for count in counts]),
    "gradients": lambda world: [setattr(p, "grad", None) for p in world.params],
}


@pytest.mark.parametrize("edit", STALE)
def test_numbers_that_are_no_longer_right_raise_nothing(edit: str) -> None:
    """The eighth step would divide by zero."""
    assert not quick(WARM, 7, groups=one_group).step(1, STALE[edit]).over


@pytest.mark.parametrize("case", [WARM, ROOTED], ids=str)
def test_numbers_that_cannot_be_raise_what_the_long_way_raises(case: Case) -> None:
    """A division by zero, and the root of a negative number, which Python returns."""
    worlds, said = quick(case, 7, groups=one_group), []
    for world in worlds.ours:
        with pytest.raises((ArithmeticError, RuntimeError)) as caught:
            steps(world.optimizer, world.params, 2, first=7)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]
    assert_same_bits(*worlds.ours)


def test_named_parameters_and_a_default_device_are_quick() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = PagedAdamW(net.named_parameters())
    steps(optimizer, [*net.parameters()], 9)
    known = record(optimizer)
    assert known
    with torch.device("cpu"):
        steps(optimizer, [*net.parameters()], 9, first=9)
    assert record(optimizer) is known


def test_the_choice_of_a_look_outlives_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(build.VARIABLE, "python")
        optimizer = PagedAdamW(params := parameters())
    steps(optimizer, params, 9)
    optimizer.load_state_dict(optimizer.state_dict())
    steps(optimizer, params, 9)
    assert record(optimizer) is None


class Rate(float):
    """A number that converts itself to another one each time."""

    now = 0.5

    def __float__(self) -> float:
        return Rate.now


def test_values_that_convert_themselves_are_asked_each_time() -> None:
    def act(world: World) -> None:
        Rate.now = 0.5 / 2**world.count

    case = Case(name="", ours=PagedAdamW, theirs=None, rule="adamw", options={"lr": Rate(1.0)}, other={})
    assert not Worlds(case, RESIDENT, PYTHON, groups=one_group).step(9, act).over


@pytest.mark.parametrize("of", ["parameter", "state"])
def test_a_lazy_clone_keeps_its_values(of: str, look: str) -> None:
    """It shares memory until somebody writes through ``data_ptr()``."""
    optimizer = PagedAdamW(params := parameters())
    steps(optimizer, params, 9)
    assert compiled(optimizer, look)
    tensor = params[2].detach() if of == "parameter" else optimizer.state[params[2]]["exp_avg"]
    before, clone = tensor.clone(), torch._lazy_clone(tensor)
    steps(optimizer, params, 3)
    assert torch.equal(clone, before)
    assert not torch.equal(optimizer.state[params[2]]["exp_avg"] if of == "state" else params[2], before)


def test_a_gradient_far_behind_in_a_freed_storage_is_refused(look: str) -> None:
    """Its offset is its address, and looks like one of memory."""
    optimizer = PagedAdamW(params := parameters())
    steps(optimizer, params, 9)
    assert compiled(optimizer, look)
    try:
        whole = torch.empty(9 << 30, dtype=torch.uint8)  # of which nothing is touched
    except RuntimeError:
        pytest.skip("no address space for 9 GiB")
    params[1].grad = whole.view(torch.float32)[-params[1].numel() :].view_as(params[1])
    whole.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="tensor 1 of grad has no memory"):
        optimizer.step()


class Names(list[str]):
    """A list that edits groups when it dies."""

    def __del__(self) -> None:
        for group in self.groups:  # type: ignore[attr-defined]
            group["lr"] = 0.5
        self.groups.append({"params": []})  # type: ignore[attr-defined]
        self.groups.pop()  # type: ignore[attr-defined]


def test_what_edits_groups_as_it_dies_in_a_look_is_followed() -> None:
    """The look holds the last of it: it dies while values of groups are taken."""

    def name(world: World) -> None:
        for group in world.groups:
            group["param_names"] = Names()
            group["param_names"].groups = world.groups

    worlds = Worlds(Case(**{**vars(ADAMW), "theirs": None}), RESIDENT, PYTHON).do(name).step(9)
    assert record(worlds.ours[0].optimizer)
    worlds.do(set_groups(None, param_names=[])).step(1)
    assert [group["lr"] for world in worlds.ours for group in world.groups] == [0.5] * 4
    assert not worlds.step(9).over


LAYOUTS: dict[str, Callable[[torch.Tensor], object]] = {
    "t_": lambda state: state.t_(),
    "data": lambda state: setattr(state, "data", state.data.t()),
}


@pytest.mark.parametrize(("edit", "sides"), [("t_", (RESIDENT, PYTHON)), ("data", (RESIDENT,))], ids=["t_", "data"])
@pytest.mark.parametrize("again", [1, 2])
def test_state_in_another_layout_over_its_memory(edit: str, sides: Any, again: int) -> None:
    """As torch, which reads elements by their indices.  Python does not see that ``.data`` is another view."""
    make = lambda device: [parameters(device)[0], numbers((6, 6), 3, device)]  # noqa: E731
    worlds = Worlds(ADAMW, *sides, make=make, groups=one_group)
    for _ in range(again):
        worlds.step(6).do(lambda world: LAYOUTS[edit](world.state[world.params[1]]["exp_avg"]))
    assert not worlds.step(6).over


# --- clipped and scaled steps in one compiled call: to the bit what the long way does, norms included -----------------


def another_norm(world: World) -> None:
    if world.ours:
        world.optimizer.max_grad_norm = 0.25 * (world.count + 1)


#: Each rule, each way to store, each norm, and norms that change, twice.
CASES_OF_NORMS = [
    pytest.param(name, side, norm, act, id=f"{name}-{side.name}-{norm}-{act.__name__}")
    for name, side, norm, act in (
        ("adamw", RESIDENT, 0.25, nothing), ("adamw", INT8[0], float("inf"), another_norm),
        ("momentum", RESIDENT, float("inf"), nothing), ("momentum", INT8[0], 1e9, another_norm),
        ("lion", RESIDENT, 1e9, another_norm), ("lion", INT8[0], 0.25, nothing),
    )
]  # fmt: skip


def of_many_chunks(device: str) -> list[torch.Tensor]:
    lists = params_of(), params_of((5, 900), torch.bfloat16), params_of((70_000,), torch.float64)
    return [p.detach().to(device) for each in lists for p in each]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "side", "norm", "act"), CASES_OF_NORMS)
def test_several_dtypes_and_lists_of_many_chunks(name: str, side: Side, norm: float, act: Act, device: str) -> None:
    """Of lists of 16-bit gradients torch takes other norms; here our sides alone are compared."""
    case, python = dataclasses.replace(BY_STATE[name], theirs=None), dataclasses.replace(side, python=True)
    worlds = Worlds(case, side, python, make=of_many_chunks, groups=one_group, clip=norm, device=device).step(9, act)
    assert worlds.ours[0].quick >= 4
    assert not worlds.over


def test_squares_of_a_gradient_follow_it_behind_an_interrupt() -> None:
    """Its address may be new in the table of the update alone."""
    params = [Parameter(torch.ones(40)), Parameter(torch.ones(3))]
    optimizer = PagedSGD(params, lr=1.0, max_grad_norm=1.0)
    steps(optimizer, params, 9)
    assert record(optimizer)
    (squares,) = optimizer._plan.factor.alone.squares.lists
    squares.table.row_words[0, 0] = squares.table.row_words[1, 0]
    for p in params:
        p.grad.fill_(2.0)
    before = record(optimizer)
    optimizer.step()
    assert record(optimizer) is before
    assert optimizer.grad_norm == pytest.approx(2 * 43**0.5)


def test_without_memory_for_a_thread_s_squares_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = PagedAdamW(params, max_grad_norm=1.0)
    steps(optimizer, params, 9)
    call = record(optimizer)._clip.launches[0].call
    kept = [p.detach().clone() for p in params]
    call.words[4] = 1  # as a kernel leaves it
    monkeypatch.setattr(type(optimizer), "_step", lambda self: None)
    before = record(optimizer)
    optimizer.step()
    assert record(optimizer) is before
    assert (call.words[4], optimizer.damaged) == (0, "")
    assert all(torch.equal(p, was) for p, was in zip(params, kept, strict=True))
