"""Steps in one compiled call: to the bit what the long way does, and what has changed between steps is noticed.

The oracle is the same optimizer whose looks are Python's.  An edit is made to both, while the compiled call is in use.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calls import calls
from edits import give, groups_of, parameters
from edits_check import World, edits_for
from gpu_support import DEVICES
from injector import interrupt_at
from often import MARKS, long_but
from optim_support import ADAMW
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

import pagedopt
from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD
from pagedopt.optim.overlap import overlap
from pagedopt.optim.step import quick
from pagedopt.optim.step.quick import QuickSteps
from pagedopt.rules.sgd import sgd
from pagedopt.system.look import parts, self_test, words
from tests.optim.specs import BY_STATE as CASES
from tests.outside.nadam import NAdam

pytestmark = pytest.mark.skipif(parts.compiled_look(wait=True) is None, reason="no compiled look here")


@pytest.fixture(autouse=True)
def _nothing_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that break queued steps may have left one, and then all steps go the long way."""
    monkeypatch.setattr(overlap, "with_queued", set())


class Never(QuickSteps):
    """No step is one call."""

    def after(self, *_: Any) -> None:
        pass


def python_s(optimizer: Any) -> Any:
    """The optimizer, whose looks are Python's from now on."""
    optimizer._quick = Never()
    return optimizer


def is_quick(optimizer: Any) -> bool:
    return optimizer._quick.step is not None


def seen(world: World) -> list[Any]:
    """All that a step changes: bits of parameters and state, step counts, and versions."""
    found: list[Any] = [(p.detach().clone(), p._version) for p in world.params]
    found += [(key, t.detach().clone(), t._version) for key, t in world.tensors().items() if not t.is_meta]
    return found


def same(ours: World, other: World) -> None:
    for a, b in zip(seen(ours), seen(other), strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype and torch.equal(bits(x), bits(y)) if isinstance(x, torch.Tensor) else x == y


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def pair(case: Any, device: str, **options: Any) -> tuple[World, World]:
    """Ours with both looks, after four steps."""
    made = []
    for python in (False, True):
        params = parameters(device)
        optimizer = case.make(False, groups_of(params), **options)
        made.append(World(python_s(optimizer) if python else optimizer, params))
        assert made[-1].attempt(4, 0) is None
    return made[0], made[1]


def go_on(ours: World, other: World, first: int, count: int = 3) -> bool:
    """Steps on both sides, one by one; returns whether they went well, and fails if they differ."""
    for step in range(first, first + count):
        mine, theirs = ours.attempt(1, step), other.attempt(1, step)
        assert (type(mine), str(mine)) == (type(theirs), str(theirs))
        same(ours, other)
        if mine is not None:
            return False
    return True


#: Cases of which all edits are run often.
OFTEN = ("adamw", "momentum")
EDITS = [
    pytest.param(name, edit, id=f"{name}: {edit}", marks=MARKS[name in OFTEN])
    for name in CASES
    for edit in edits_for(CASES[name])
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "edit"), EDITS)
def test_an_edit_is_noticed_again_and_again(name: str, edit: str, device: str) -> None:
    ours, other = pair(CASES[name], device)
    assert is_quick(ours.optimizer)
    assert not is_quick(other.optimizer)
    for number in range(2):
        for world in (ours, other):
            try:
                edits_for(CASES[name])[edit](world.optimizer, world.params)
            except Exception:  # nothing is left to edit
                return
        if not go_on(ours, other, 4 + 6 * number, count=6):
            return


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", long_but(range(400), range(16).__contains__))
def test_edits_at_random(seed: int, device: str) -> None:
    chance = random.Random(seed)
    case = CASES[list(CASES)[seed % len(CASES)]]
    found = [edit for name, edit in edits_for(case).items() if name[:3] != "no "]
    ours, other = pair(case, device, **({"state_format": "int8"} if seed % 3 == 2 and case.names else {}))
    for number in range(8):
        edit = chance.choice(found)
        state = random.getstate()
        for world in (ours, other):
            random.setstate(state)
            try:
                edit(world.optimizer, world.params)
            except Exception:
                world.optimizer.state.clear()
        if not go_on(ours, other, 4 + 4 * number, count=chance.randrange(1, 5)):
            return


@pytest.mark.parametrize("device", DEVICES)
def test_many_steps_in_flight(device: str) -> None:
    """More steps than there are buffers for tables, each with gradients elsewhere, and none is waited for."""
    both = []
    for python in (False, True):
        params = [Parameter(torch.ones(2, 3, device=device)) for _ in range(200)]
        optimizer = PagedAdamW(params)
        if python:
            python_s(optimizer)
        alive = []
        for step in range(60):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, 0.25 + (step * i) % 7)
            alive.append([p.grad for p in params])
            optimizer.step()
        both.append(World(optimizer, params))
    same(*both)


@pytest.mark.parametrize("device", DEVICES)
def test_another_stream_and_a_fresh_thread(device: str) -> None:
    both = []
    for python in (False, True):
        params = parameters(device)
        optimizer = PagedAdamW(params, **ADAMW)
        if python:
            python_s(optimizer)
        for step in range(8):
            give(params, step)
            stream = torch.cuda.Stream() if device == "cuda" else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.step()
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            give(params, 100 + step)
            if device == "cuda":
                torch.cuda.synchronize()
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
            if device == "cuda":
                torch.cuda.synchronize()
        both.append(World(optimizer, params))
    same(*both)


def train(optimizer: Any, params: list[Parameter], act: Callable[[Any, int], None], steps: int = 9) -> int:
    """Steps with new gradients, before each of which ``act`` edits groups; how many were one call."""
    found = 0
    for step in range(steps):
        give(params, step)
        act(optimizer, step)
        before = optimizer._quick.step
        optimizer.step()
        found += before is not None and optimizer._quick.step is before
    return found


def set_all(name: str, value: Callable[[int], Any]) -> Callable[[Any, int], None]:
    def act(optimizer: Any, step: int) -> None:
        for i, group in enumerate(optimizer.param_groups):
            group[name] = value(step + 100 * i)

    return act


GROUPS: dict[str, tuple[Callable[[Any, int], None], bool]] = {
    "lr": (set_all("lr", lambda k: 0.01 / (k + 1)), True),
    "a NumPy number": (set_all("lr", lambda k: np.float64(0.01 / (k + 1))), True),
    "a narrow NumPy number": (set_all("weight_decay", lambda k: np.float32(0.01 * k)), True),
    "a tuple": (set_all("betas", lambda k: (0.5 + 0.001 * k, 0.75)), True),
    "a tuple of NumPy numbers": (set_all("betas", lambda k: (np.float64(0.5 + 0.001 * k), 0.75)), True),
    "an int": (set_all("weight_decay", lambda k: k % 3), True),
    "a switch": (set_all("maximize", lambda k: k % 2 == 0), True),
    "a tensor": (set_all("lr", lambda k: torch.tensor(0.01 / (k + 1))), False),
    "a list": (set_all("betas", lambda k: [0.5, 0.75]), False),
    "a rule": (set_all("decoupled_weight_decay", lambda k: k < 5), True),
}


@pytest.mark.parametrize("what", GROUPS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_values_of_groups_that_are_new_in_each_step(what: str, groups: int, device: str) -> None:
    act, is_one_call = GROUPS[what]
    params, others = parameters(device), parameters(device)
    make = groups_of if groups == 2 else lambda params: params
    ours, other = PagedAdamW(make(params), **ADAMW), python_s(PagedAdamW(make(others), **ADAMW))
    taken = train(ours, params, act)
    train(other, others, act)
    same(World(ours, params), World(other, others))
    assert (taken >= 3) == is_one_call


def mixed(device: str) -> list[Parameter]:
    shapes = [(7,), (3, 5), (), (0,), (64, 3), (2, 2, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float64, torch.float16]
    return [Parameter(torch.ones(s, dtype=d, device=device)) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize("make", [PagedAdamW, PagedLion, lambda p, **k: PagedSGD(p, momentum=0.9, **k), NAdam])
@pytest.mark.parametrize("form", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_several_launches_formats_and_numbers(make: Any, form: str | None, device: str) -> None:
    both = []
    for python in (False, True):
        params = mixed(device)
        optimizer = make(params, lr=0.01, state_format=form)
        if python:
            python_s(optimizer)
        taken = train(optimizer, params, lambda *_: None)
        assert python or taken >= 4
        both.append(World(optimizer, params))
    same(*both)


@pytest.mark.parametrize("absent", [[1], [0, 4], [5]])
@pytest.mark.parametrize("counts", ["equal", "apart"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_stays_away(absent: list[int], counts: str, device: str) -> None:
    both = []
    for python in (False, True):
        params = parameters(device)
        optimizer = PagedAdamW(groups_of(params), **ADAMW)
        if python:
            python_s(optimizer)
        taken = 0
        for step in range(12):
            give(params, step, skip=absent if step > 3 or counts == "apart" else ())
            before = optimizer._quick.step
            optimizer.step()
            taken += before is not None and step > 5
        assert python or taken >= 4
        both.append(World(optimizer, params))
    same(*both)


def test_patience_doubles_while_gradients_come_and_go() -> None:
    params, others = parameters(), parameters()
    ours, other = PagedAdamW(params), python_s(PagedAdamW(others))
    for step in range(40):
        for mine, optimizer in ((params, ours), (others, other)):
            give(mine, step, skip=[1] if step // 3 % 2 else ())
            optimizer.step()
    same(World(ours, params), World(other, others))
    assert ours._quick.patience > 4


@pytest.fixture
def simple() -> tuple[Any, list[Parameter]]:
    params = parameters()
    optimizer = PagedAdamW(params, **ADAMW)
    for step in range(4):
        give(params, step)
        optimizer.step()
    assert is_quick(optimizer)
    return optimizer, params


def test_it_is_few_calls(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, params = simple
    give(params, 4)
    assert len(calls(optimizer.step)) <= 28


def steps_seen(optimizer: Any, act: Callable[[], object]) -> float:
    before = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item()
    act()
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() - before


def test_hooks_run_around_each_step(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, _ = simple
    record, found = optimizer._quick.step, []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: found.append("before")),
        optimizer.register_step_post_hook(lambda *_: found.append("behind")),
    ]
    assert steps_seen(optimizer, optimizer.step) == 1
    assert found == ["before", "behind"]
    for handle in handles:
        handle.remove()
    assert steps_seen(optimizer, optimizer.step) == 1
    assert (found, optimizer._quick.step) == (["before", "behind"], record), "a record that need not be made again"


def test_global_hooks_run_around_each_step(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, _ = simple
    found: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *_: found.append(1))
    try:
        assert steps_seen(optimizer, optimizer.step) == 1
    finally:
        handle.remove()
    assert found == [1]


def test_hooks_run_around_the_step_of_a_subclass_as_often_as_in_torch() -> None:
    counted = []
    for base in (PagedAdamW, torch.optim.AdamW):
        base(parameters())  # from now on its step has torch's hooks

        def step(self: Any, closure: Any = None, base: Any = base) -> Any:
            return base.step(self, closure)

        params = parameters()
        optimizer = type("Own", (base,), {"step": step})(params)
        found: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_, found=found: found.append(1))
        for number in range(5):
            give(params, number)
            optimizer.step()
        counted.append(len(found))
    assert counted[0] == counted[1]


def test_a_profiler_sees_each_step(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, _ = simple
    record = optimizer._quick.step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            optimizer.step()
    counted = {e.key: e.count for e in profiler.key_averages()}
    assert counted["Optimizer.step#PagedAdamW.step"] == 3
    assert optimizer._quick.step is record


def test_a_dict_of_formats_that_is_edited() -> None:
    found = []
    for python in (False, True):
        params, formats = parameters(), {"exp_avg": "float32"}
        optimizer = PagedAdamW(params, state_format=formats)
        if python:
            python_s(optimizer)
        train(optimizer, params, lambda *_: None)
        optimizer.state_format["exp_avg"] = "bfloat16"
        give(params, 20)
        try:
            optimizer.step()
            found.append(None)
        except Exception as error:
            found.append(str(error))
    assert found[0] == found[1]


LONG: dict[str, Callable[[Any], object]] = {
    "a closure": lambda optimizer: optimizer.step(lambda: 0),
    "a closure by name": lambda optimizer: optimizer.step(closure=lambda: 0),
    "a hook": lambda optimizer: with_hook(optimizer),
    "a function mode": lambda optimizer: in_mode(optimizer),
    "torch.compile": lambda optimizer: torch.compile(lambda: optimizer.step(), backend="eager")(),
}


def with_hook(optimizer: Any) -> None:
    handle = optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()
    handle.remove()


def in_mode(optimizer: Any) -> None:
    with torch.overrides.BaseTorchFunctionMode():
        optimizer.step()


@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("edit", ["absent", "present", "elsewhere", "none"])
def test_a_step_the_long_way_between_may_write_the_table(long: str, edit: str) -> None:
    """The record is of the table as it was: the long step has other rows in it."""
    both = []
    for python in (False, True):
        params = parameters()
        optimizer = PagedAdamW(params, **ADAMW)
        if python:
            python_s(optimizer)
        usual = (1,) if edit == "present" else ()
        for step in range(5):
            give(params, step, skip=usual)
            optimizer.step()
        assert python or is_quick(optimizer)
        memory = params[2].data
        give(params, 5, skip=(1,) if edit == "absent" else ())
        if edit == "elsewhere":
            params[2].data = memory.clone()
        LONG[long](optimizer)
        if edit == "elsewhere":
            params[2].data = memory
        for step in range(6, 12):
            give(params, step, skip=usual)
            optimizer.step()
        assert python or is_quick(optimizer)
        both.append(World(optimizer, params))
    if long == "torch.compile":  # a compiled function raises versions as it likes
        for a, b in zip(both[0].params, both[1].params, strict=True):
            assert torch.equal(a, b)
        return
    same(*both)


def test_a_rare_hook_does_not_wear_out_its_patience() -> None:
    params = parameters()
    optimizer = PagedAdamW(params)
    for step in range(200):
        give(params, step)
        if step % 20 == 10:
            with_hook(optimizer)
        else:
            optimizer.step()
    assert optimizer._quick.patience <= 8


def test_none_in_place_of_a_closure_is_no_closure(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, params = simple
    give(params, 4)
    assert len(calls(lambda: optimizer.step(None))) <= 28


class Slow(PagedSGD):
    """A class whose rule may be set."""


OTHER_RULES: dict[str, Callable[[Any], object]] = {
    "of the object": lambda optimizer: setattr(optimizer, "rule_of", lambda group: sgd),
    "of the class": lambda optimizer: setattr(type(optimizer), "rule_of", lambda self, group: sgd),
}


@pytest.mark.parametrize("how", OTHER_RULES)
def test_another_rule_is_noticed(how: str) -> None:
    both = []
    for python in (False, True):
        cls = type("Own", (Slow,), {})
        params = parameters()
        optimizer = cls(params, lr=0.1, momentum=0.9)
        if python:
            python_s(optimizer)
        assert train(optimizer, params, lambda *_: None) >= 4 or python
        OTHER_RULES[how](optimizer)
        for step in range(3):
            give(params, 20 + step)
            optimizer.step()
        both.append(World(optimizer, params))
    same(*both)


@pytest.mark.parametrize("how", ["wrapped", "plain"])
def test_hooks_stay_when_a_class_s_step_is_replaced(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(PagedAdamW):
        pass

    params = parameters()
    optimizer = Own(params)
    of_class = Own.step
    around: Any = lambda self, *args: of_class(self, *args)  # noqa: E731
    monkeypatch.setattr(Own, "step", functools.wraps(of_class)(around) if how == "wrapped" else around)
    found: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: found.append("before"))
    for step in range(3):
        give(params, step)
        optimizer.step()
    assert len(found) == 3


def test_counts_whose_memory_goes_are_not_read() -> None:
    params = parameters()
    optimizer = PagedAdamW(params)
    give(params, 0)
    optimizer.step()
    flat = torch.zeros(40 << 20)
    for i, p in enumerate(params):
        optimizer.state[p]["step"] = flat[i + (20 << 20)]
        flat[i + (20 << 20)] = i
    for step in range(5):
        give(params, step)
        optimizer.step()
    assert is_quick(optimizer)
    flat.share_memory_()
    give(params, 6)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [6 + i for i in range(len(params))]


@pagedopt.rule
def warm(param: Any, grad: Any, *, lr: Any, total: Any, step: Any) -> Any:
    param = param - lr / (total - step) * grad
    return param


class Warm(PagedOptimizer):
    rule = warm

    def __init__(self, params: Any, lr: float = 0.1, total: float = 8.0, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "total": total}, **options)


STALE: dict[str, Callable[[Any, list[Parameter]], object]] = {
    "groups": lambda optimizer, _: optimizer.param_groups[0].update(total=16.0),
    "counts": lambda optimizer, _: [entry["step"].zero_() for entry in optimizer.state.values()],
    "gradients": lambda _, params: [setattr(p, "grad", None) for p in params],
}


@pytest.mark.parametrize("edit", STALE)
def test_numbers_that_are_no_longer_right_raise_nothing(edit: str) -> None:
    both = []
    for python in (False, True):
        params = parameters()
        optimizer = Warm(params)
        if python:
            python_s(optimizer)
        train(optimizer, params, lambda *_: None, steps=7)
        assert python or is_quick(optimizer)
        give(params, 7)
        STALE[edit](optimizer, params)
        optimizer.step()
        both.append(World(optimizer, params))
    same(*both)


def test_a_step_that_somebody_has_replaced_is_called_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    of_base = PagedOptimizer.step
    monkeypatch.setattr(PagedOptimizer, "step", lambda self, *a: (called.append(1), of_base(self, *a))[1])
    optimizer = type("Own", (PagedOptimizer,), {"rule": warm})(params := parameters(), {"lr": 0.1, "total": 99.0})
    train(optimizer, params, lambda *_: None, steps=6)
    assert len(called) == 6


def test_named_parameters_and_a_default_device_are_quick() -> None:
    net = torch.nn.Linear(3, 2)
    params = [*net.parameters()]
    optimizer = PagedAdamW(net.named_parameters())
    assert train(optimizer, params, lambda *_: None) >= 4
    with torch.device("cpu"):
        assert train(optimizer, params, lambda *_: None) >= 4


def test_the_choice_of_a_look_outlives_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(parts.VARIABLE, "python")
        optimizer = PagedAdamW(params := parameters())
    train(optimizer, params, lambda *_: None)
    optimizer.load_state_dict(optimizer.state_dict())
    assert train(optimizer, params, lambda *_: None) == 0


def test_values_that_convert_themselves_are_asked_each_time() -> None:
    class Rate(float):
        now = 0.5

        def __float__(self) -> float:
            return Rate.now

    both = []
    for python in (False, True):
        Rate.now = 0.5
        params = parameters()
        optimizer = PagedAdamW(params, lr=Rate(1.0))
        if python:
            python_s(optimizer)
        train(optimizer, params, lambda *_: setattr(Rate, "now", Rate.now / 2))
        both.append(World(optimizer, params))
    same(*both)


def test_a_closure_is_called(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, _ = simple
    assert optimizer.step(lambda: 5) == 5
    assert optimizer.step(closure=lambda: 6) == 6


def test_a_function_mode_that_takes_gradients_is_asked(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, _ = simple
    asked: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        assert steps_seen(optimizer, optimizer.step) == 1
    assert torch.Tensor.grad.__get__ in asked  # type: ignore[attr-defined]


def test_other_threads_of_torch_or_of_python(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, _ = simple
    other = copy.deepcopy(optimizer)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert steps_seen(optimizer, optimizer.step) == 1
    finally:
        torch.set_num_threads(before)
    thread = threading.Thread(target=optimizer.step)
    assert steps_seen(optimizer, lambda: (thread.start(), thread.join())) == 1
    assert not is_quick(other)


def test_with_a_team_of_threads() -> None:
    both, before = [], torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for python in (False, True):
            params = [Parameter(torch.ones(1 << 17)), Parameter(torch.ones(3))]
            optimizer = PagedAdamW(params)
            if python:
                python_s(optimizer)
            assert train(optimizer, params, lambda *_: None) >= 4 or python
            both.append(World(optimizer, params))
    finally:
        torch.set_num_threads(before)
    same(*both)


def test_what_a_look_cannot_do_goes_the_long_way() -> None:
    def quick_after(make: Callable[[], tuple[Any, list[Any]]]) -> bool:
        optimizer, params = make()
        train(optimizer, params, lambda *_: None)
        return is_quick(optimizer)

    large = [Parameter(torch.ones(quick.MAX_ELEMENTS + 1))]
    assert not quick_after(lambda: (PagedAdamW(large), large))
    complexes = [Parameter(torch.ones(3, dtype=torch.complex64))]
    assert not quick_after(lambda: (PagedAdamW(complexes), complexes))
    strided = [Parameter(torch.ones(4, 6)[:, ::2])]
    assert not quick_after(lambda: (PagedAdamW(strided), strided))

    class Mine(Parameter):
        pass

    own = [Mine(torch.ones(3))]
    assert not quick_after(lambda: (PagedAdamW(own), own))


def test_no_memory_of_the_user_s_is_kept(simple: tuple[Any, list[Parameter]]) -> None:
    import gc
    import weakref

    optimizer, params = simple
    storages = [weakref.ref(p.untyped_storage()) for p in params]
    states = [weakref.ref(t.untyped_storage()) for e in optimizer.state.values() for t in e.values() if t.dim()]
    optimizer.param_groups[0]["params"] = []
    optimizer.state.clear()
    params.clear()
    gc.collect()
    assert is_quick(optimizer)
    assert [ref() for ref in (*storages, *states)] == [None] * len([*storages, *states])
    optimizer.step()


def test_variable_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parts.VARIABLE, "python")
    params = parameters()
    optimizer = PagedAdamW(params)
    assert train(optimizer, params, lambda *_: None) == 0


def test_an_interrupt_at_each_line_leaves_a_whole_step_or_none() -> None:
    import signal

    def made() -> World:
        params = parameters()
        world = World(PagedAdamW(groups_of(params), **ADAMW), params)
        assert world.attempt(4, 0) is None
        give(params, 4)
        world.optimizer.param_groups[0]["lr"] = 0.5 + 0.125
        return world

    def finished(world: World) -> list[Any]:
        python_s(world.optimizer)
        assert world.attempt(2, 5) is None
        return seen(world)

    def equal(a: list[Any], b: list[Any]) -> bool:
        return all(torch.equal(bits(x[0] if isinstance(x[0], torch.Tensor) else x[1]),
                               bits(y[0] if isinstance(y[0], torch.Tensor) else y[1]))
                   for x, y in zip(a, b, strict=True))  # fmt: skip

    taken, left = made(), made()
    taken.optimizer.step()
    of_taken, of_left = finished(taken), finished(left)
    events = interrupt_at(10**6, signal.SIGINT, made().optimizer.step).events
    assert events > 40
    kinds = set()
    for at in range(1, events + 1):
        world = made()
        count = world.optimizer.state[world.params[0]]["step"].item()
        out = interrupt_at(at, signal.SIGINT, world.optimizer.step)
        assert isinstance(out.error, KeyboardInterrupt)
        stepped = world.optimizer.state[world.params[0]]["step"].item() > count
        kinds.add(stepped)
        assert equal(finished(world), of_taken if stepped else of_left), out.shots
    assert kinds == {False, True}


# --- the test of the private parts ------------------------------------------------------------------------------------


def changed(**others: str) -> parts.Look:
    look = parts.look_of_this_build()
    assert look is not None
    swapped = look.parts.copy()
    for name, other in others.items():
        swapped[getattr(words, name)] = look.parts[getattr(words, other)]
    return look._replace(parts=swapped)


def test_the_look_works() -> None:
    assert self_test.works(changed())


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("GET_STRIDES", "GET_SIZES"), ("IS_NEG", "IS_INFERENCE"), ("BUMP_VERSION", "IS_NEG"),
        ("GET_DTYPE", "GET_DEVICE_TYPE"), ("GET_DATA_PTR", "GET_DIM"), ("DICT", "LIST"), ("TENSOR", "LIST"),
        ("UNDEFINED", "STRIDED"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_found(part: str, other: str) -> None:
    assert not self_test.works(changed(**{part: other}))


def test_a_missing_symbol_means_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts._OF_C10, "GRAD", "_ZNK3c1010TensorImpl4gradEw")
    parts._look_of_this_build.cache_clear()
    try:
        assert parts.look_of_this_build() is None
    finally:
        parts._look_of_this_build.cache_clear()


@pytest.mark.parametrize("executable", ["", None, "/opt/app/train", "/nowhere/python3"])
def test_what_is_no_interpreter_is_not_started(executable: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parts.sys, "executable", executable)
    assert parts._Verdict().ask(wait=True) == parts._FAILS
    assert parts._cached() is None


def test_a_frozen_application_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parts.sys, "frozen", True, raising=False)
    assert parts._Verdict().ask(wait=True) == parts._FAILS


@pytest.mark.parametrize(
    ("code", "verdict", "cached"),
    [
        ("import os; os._exit(0)", parts._WORKS, None),
        ("import os; os._exit(3)", parts._FAILS, None),
        ("import os; os.kill(os.getpid(), 11)", parts._FAILS, parts._FAILS),
        ("import os; os.kill(os.getpid(), 9)", parts._FAILS, None),
        ("raise SystemError", parts._FAILS, None),
    ],
)
def test_the_verdict_of_a_child(
    code: str, verdict: bytes, cached: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parts, "_CODE", code)
    asked = parts._Verdict()
    assert asked.ask(wait=True) == verdict
    assert parts._cached() == cached
    if cached:
        assert parts._Verdict().ask(wait=False) == cached
