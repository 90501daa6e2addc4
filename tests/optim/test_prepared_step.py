"""A prepared step is a value; what is compared between steps keeps nothing alive."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import CodeType
from typing import Any

import pytest
import torch
from calls import PACKAGE, calls
from optim_support import ADAMW, bits, ready, same
from support import threads

from pagedopt import PagedAdamW
from pagedopt.kernels import cpu
from pagedopt.optim import seen
from pagedopt.optim.pages import Route
from pagedopt.optim.scalars import ScalarState
from pagedopt.system import compare_tensors, look
from pagedopt.system.interrupts import Uninterrupted
from pagedopt.tables.layout import HostTable
from pagedopt.tables.pointers import PointerTable
from tests.acts import acts_of, transposed
from tests.specs import CASES
from tests.world import SIDES, World, Worlds, numbers, one_group

PLACEMENTS: list[dict[str, Any]] = [{}, {"device_budget": 0}, {"device_budget": "50%"}]


def parameters(count: int = 3, numel: int = 50_000) -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(numel + i)) for i in range(count)]


def gradients(params: list[torch.nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 0.1 * step + i - 1)


def step(params: list[torch.nn.Parameter], opt: torch.optim.Optimizer, number: int) -> None:
    gradients(params, number)
    opt.step()


def trained(steps: int, count: int = 3, **options: Any) -> tuple[list[torch.nn.Parameter], PagedAdamW]:
    params = parameters(count)
    opt = PagedAdamW(params, **ADAMW, **options)
    for number in range(steps):
        step(params, opt, number)
    return params, opt


@pytest.fixture(params=["fast", "slow"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tensors are looked at: with private parts, or without."""
    if request.param == "slow":
        monkeypatch.setattr(compare_tensors, "_pointers_are_there", lambda: False)
        monkeypatch.setattr(compare_tensors, "_compiled_loop", lambda: None)
        monkeypatch.setattr(compare_tensors, "_guards_work", lambda: False)
    return str(request.param)


# --- a value ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_that_is_prepared_and_dropped_changes_nothing(steps: int, options: dict[str, Any]) -> None:
    params, opt = trained(steps, **options)
    gradients(params, steps)
    before, held = bits(params, opt) if steps else [p.detach().clone() for p in params], dict(opt.state)
    prepared = opt._prepare()
    assert [work.absent for work in prepared.work] == [[]]
    del prepared
    assert dict(opt.state) == held
    assert same(bits(params, opt) if steps else [p.detach() for p in params], before)
    opt.step()
    assert same(bits(params, opt), bits(*trained(steps + 1, **options)))


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
def test_a_step_that_is_kept_for_later_is_the_step_of_when_it_was_prepared(options: dict[str, Any]) -> None:
    params, opt = trained(2, **options)
    gradients(params, 2)
    prepared = opt._prepare()
    opt.zero_grad()
    opt.param_groups[0]["lr"] = 100.0
    assert prepared.run() is opt._plan
    expected = bits(*trained(3, **options))
    assert same(bits(params, opt), expected), "the gradients that it holds, the learning rate it had"


def test_two_steps_prepared_at_once_do_not_mix() -> None:
    params, opt = trained(2)
    before = bits(params, opt)
    gradients(params, 2)
    first = opt._prepare()
    gradients(params, 7)
    second = opt._prepare()
    with pytest.raises(RuntimeError, match="another step was prepared since"):
        first.run()
    assert same(bits(params, opt), before)
    assert opt.damaged == ""
    second.run()
    twins, twin = trained(2)
    step(twins, twin, 7)
    assert same(bits(params, opt), bits(twins, twin))


def test_a_prepared_step_says_what_it_will_do() -> None:
    params, opt = trained(1, device_budget=0)
    params[1].grad = None
    (work,) = opt._prepare().work
    assert (work.absent, len(work.sets)) == ([1], 1)
    assert [coming for _, _, coming in work.counts] == [2.0]
    assert [type(step).__name__ for step in work.plan][-1] == "Evict"


# --- nothing is kept alive --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_state_that_is_cleared_is_freed_at_once(steps: int, options: dict[str, Any]) -> None:
    params, opt = trained(steps, **options)
    seen = [weakref.ref(t) for p in params for t in opt.state[p].values()]
    arenas = [weakref.ref(arena) for arena in opt.store.arenas]
    assert bool(arenas) == bool(options)
    opt.state.clear()
    assert [ref() for ref in seen] == [None] * len(seen)
    assert opt.store.arenas == []
    gc.collect()
    assert [ref() for ref in arenas] == [None] * len(arenas)
    assert not opt.memory_report().by_place
    step(params, opt, steps)  # and begins anew
    assert all(float(opt.state[p]["step"]) == 1 for p in params)


def test_parameters_that_are_taken_out_are_freed_at_once() -> None:
    params, opt = trained(2)
    ref = weakref.ref(params[0])
    del opt.state[params[0]]
    opt.param_groups[0]["params"].pop(0)
    params.pop(0)
    assert ref() is None


def test_a_replaced_tensor_is_freed_at_once_and_its_successor_used() -> None:
    params, opt = trained(2)
    entry = opt.state[params[0]]
    ref = weakref.ref(entry["exp_avg"])
    entry["exp_avg"] = entry["exp_avg"].clone()
    assert ref() is None
    step(params, opt, 2)
    assert same(bits(params, opt), bits(*trained(3)))


# --- what fails before the first write damages nothing ----------------------------------------------------------------

BEFORE = [
    (HostTable, "shares"), (HostTable, "set_scalars"), (cpu.Call, "__init__"), (seen, "identities"),
    (ScalarState, "read"), (Uninterrupted, "__enter__"), (Route, "mover"),
]  # fmt: skip


@threads(2)
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("owner", "name", "steps"),
    [*((*one, steps) for one in BEFORE for steps in (0, 2)), (PointerTable, "look", 2)],  # not at tables just made
    ids=lambda one: getattr(one, "__name__", one),
)
def test_what_runs_out_of_memory_before_the_first_write_damages_nothing(
    owner: Any, name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two dtypes take two launches, two threads a team."""
    params = [*parameters(2, 1 << 20), torch.nn.Parameter(torch.randn(1 << 16).double())]
    opt = PagedAdamW(params, **ADAMW, device_budget=0 if owner is Route else None)
    for number in range(steps):
        step(params, opt, number)
    before = [p.detach().clone() for p in params], {p: dict(opt.state[p]) for p in opt.state}
    gradients(params, steps)
    if name in ("shares", "__init__"):  # shares are asked for once for a table and number of threads
        opt._plan = None
    hit = [0]

    def fail(*_: Any, **__: Any) -> None:
        hit[0] += 1
        raise MemoryError(name)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(MemoryError, match=name):
            opt.step()
    assert (hit[0], opt.damaged) == (1, "")
    assert same(before[0], params)
    assert {p: dict(opt.state[p]) for p in opt.state} == before[1]
    opt.step()
    assert all(float(opt.state[p]["step"]) == steps + 1 for p in params)


# --- every way to look ------------------------------------------------------------------------------------------------


def swap_sizes(w: World) -> None:
    a, b = (w.state[p] for p in w.params[:2])
    a["exp_avg"], b["exp_avg"] = b["exp_avg"][: len(a["exp_avg"])].clone(), torch.cat([a["exp_avg"], a["exp_avg"][:1]])


def put_last(w: World) -> None:
    w.state[w.params[0]] = w.state.pop(w.params[0])


EDITS = {
    "moments of two sizes": swap_sizes,
    "another order": put_last,
    **{
        name: acts_of("adamw")[name]
        for name in (
            "one entry of clones", "delete", "foreign name", "exp_avg_sq: data", "step: data", "parameters .data",
        )
    },
}  # fmt: skip


def come_go_and_change(w: World) -> None:
    for i, p in enumerate(w.params):
        if w.count in (4, 5, 8) and i % 3 == w.count % 3:
            p.grad = None
        elif w.count in (6, 7, 9) and i % 2 and p.grad is not None:
            p.grad = transposed(p.grad)


def many(count: int, *shape: int) -> dict[str, Any]:
    made = [numbers((*shape, 50 + i), i) for i in range(count)]
    return {"make": lambda _: [t.clone() for t in made], "groups": one_group}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.usefixtures("way")
def test_what_users_do_to_state_is_followed_however_it_is_looked_at(count: int, edit: str) -> None:
    worlds = Worlds(CASES["adamw"], *SIDES[:3], **many(count)).step(5)
    assert not worlds.do(EDITS[edit]).step(2).over


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [3, 40])
def test_gradients_that_come_go_and_change_are_followed_however_they_are_looked_at(count: int) -> None:
    assert not Worlds(CASES["momentum"], *SIDES[:3], **many(count, 4)).step(12, come_go_and_change).over


def test_private_parts_that_answer_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compare_tensors, "_LOOP", compare_tensors._LOOP.replace("8 * i", "0"))
        assert compare_tensors._compiled_loop.__wrapped__() is None
    monkeypatch.setattr(compare_tensors, "_ITEMS_AT", 0)
    assert not compare_tensors._pointers_are_there.__wrapped__()
    monkeypatch.setattr(compare_tensors, "_guards", lambda tensors: lambda *others: True)
    assert not compare_tensors._guards_work.__wrapped__()


def test_a_compiled_loop_finds_what_python_finds() -> None:
    whole = torch.empty(100)
    tensors = [whole[i : i + i % 3] for i in range(60)] + [torch.nn.Parameter(torch.empty(i)) for i in range(9)]
    if compare_tensors._compiled_loop() is None:
        pytest.skip("this torch or Python has no such private parts")
    assert compare_tensors.addresses((*tensors,)) == compare_tensors.addresses((*tensors,), sure=False)


# --- how many functions of the package a warm step runs through: each costs host time, most of all with cold caches ---


def changes_of_room(functions: list[CodeType]) -> int:
    rooms = [function.co_filename.removeprefix(PACKAGE).partition("/")[0] for function in functions]
    return sum(a != b for a, b in itertools.pairwise(rooms))


@pytest.mark.parametrize(("anew", "most"), [(False, 56), (True, 61)], ids=["kept", "anew"])
def test_a_warm_step_over_one_tensor_is_few_calls(anew: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Python's look; the compiled one takes some 20."""
    monkeypatch.setenv(look.VARIABLE, "python")
    params = [torch.nn.Parameter(torch.ones(4))]
    opt = PagedAdamW(params)
    for step in range(6):
        if anew or not step:
            old = params[0].grad  # alive: the next one lies elsewhere
            params[0].grad = torch.ones(4)
        found = calls(opt.step)
    assert old is None or old.data_ptr() != params[0].grad.data_ptr()
    assert len(found) <= most
    assert changes_of_room(found) <= 28


def test_a_first_step_of_one_parameter_is_few_calls() -> None:
    for _ in range(2):  # the first of a process loads its kernel
        opt = PagedAdamW([param := ready(4)])
        found = calls(opt.step)
    assert param in opt.state
    assert len(found) <= 392


@pytest.mark.usefixtures("folder")
def test_a_warm_step_over_a_file_is_few_calls() -> None:
    opt = PagedAdamW([ready(1 << 20) for _ in range(8)], device_budget=0)
    for _ in range(4):
        found = calls(opt.step)
    (arena,) = opt.store.arenas
    assert arena.layout.pages == 16
    assert len(found) <= 160  # 16 of them go on in a generator, behind each launch
    opt.set_device_budget("50%")
    for _ in range(3):
        half = calls(opt.step)
    assert len(found) - len(half) <= 6 * 8, "of which at most six for each page"
