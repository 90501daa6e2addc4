"""What surrounds quick steps: hooks, profilers, closures, modes, threads, interrupts."""

from __future__ import annotations

import copy
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import calls
from gpu_support import NEEDED
from support import threads
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from pagedopt import PagedAdamW, PagedOptimizer
from pagedopt.optim import quick
from tests.optim.quick_steps import Warm, compiled_alone, nothing_is_queued
from tests.specs import CASES
from tests.world import PYTHON, RESIDENT, World, Worlds, give, numbers, one_group, parameters, record, steps

__all__ = ["nothing_is_queued"]  # fixtures
pytestmark = compiled_alone


@pytest.fixture
def simple() -> tuple[Any, list[Parameter]]:
    """An optimizer whose steps are quick, and its parameters."""
    world = World(CASES["adamw"], RESIDENT, groups=one_group)
    steps(world.optimizer, world.params, 4)
    assert record(world.optimizer)
    return world.optimizer, world.params


def steps_seen(optimizer: Any, act: Callable[[], object]) -> float:
    before = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item()
    act()
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() - before


@pytest.mark.parametrize(
    ("clip", "device", "most"), [(None, "cpu", 24), (0.5, "cpu", 30), pytest.param(0.5, "cuda", 62, marks=NEEDED)]
)
def test_it_is_few_calls(clip: float | None, device: str, most: int) -> None:
    """With None in place of a closure, too."""
    world = World(CASES["adamw"], RESIDENT, device, groups=one_group, clip=clip)
    steps(world.optimizer, world.params, 9)
    for step in (world.optimizer.step, lambda: world.optimizer.step(None)):
        give(world.params, 9)
        assert len(calls(step)) <= most


def test_hooks_run_around_each_step(simple: tuple[Any, list[Parameter]]) -> None:
    optimizer, _ = simple
    known, found = record(optimizer), list[str]()
    handles = [
        optimizer.register_step_pre_hook(lambda *_: found.append("before")),
        optimizer.register_step_post_hook(lambda *_: found.append("behind")),
        register_optimizer_step_post_hook(lambda *_: found.append("behind any")),
    ]
    assert steps_seen(optimizer, optimizer.step) == 1
    for handle in handles:
        handle.remove()
    assert sorted(found) == ["before", "behind", "behind any"]
    assert steps_seen(optimizer, optimizer.step) == 1
    assert (len(found), record(optimizer)) == (3, known), "a record that need not be made again"


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
    known = record(optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            optimizer.step()
    counted = {e.key: e.count for e in profiler.key_averages()}
    assert counted["Optimizer.step#PagedAdamW.step"] == 3
    assert record(optimizer) is known


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


def test_a_step_that_somebody_has_replaced_is_called_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    of_base = PagedOptimizer.step
    monkeypatch.setattr(PagedOptimizer, "step", lambda self, *a: (called.append(1), of_base(self, *a))[1])
    optimizer = type("Own", (PagedOptimizer,), {"rule": Warm.rule})(params := parameters(), {"lr": 0.1, "total": 99.0})
    steps(optimizer, params, 6)
    assert len(called) == 6


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
    with threads(2):
        assert steps_seen(optimizer, optimizer.step) == 1
    thread = threading.Thread(target=optimizer.step)
    assert steps_seen(optimizer, lambda: (thread.start(), thread.join())) == 1
    assert not record(other)


def test_with_a_team_of_threads() -> None:
    with threads(2):
        two = lambda device: [numbers((1 << 17,), 1), numbers((3,), 2)]  # noqa: E731
        worlds = Worlds(CASES["adamw"], RESIDENT, PYTHON, make=two, groups=one_group).step(9)
    assert worlds.ours[0].quick >= 4


def test_a_forked_process_begins_the_long_way(simple: tuple[Any, list[Parameter]]) -> None:
    """It does not have the threads of its parent's team."""
    optimizer, params = simple
    give(params, 4)
    known = record(optimizer)
    if not (child := os.fork()):
        signal.alarm(20)  # it would wait for those threads forever
        try:
            optimizer.step()
        finally:
            os._exit(0 if record(optimizer) is not known else 1)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert record(optimizer) is known


class Mine(Parameter):
    """A class of the user's."""


LONG: dict[str, Callable[[], Parameter]] = {
    "large": lambda: Parameter(torch.ones(quick.MAX_ELEMENTS + 1)),
    "complex": lambda: Parameter(torch.ones(3, dtype=torch.complex64)),
    "strided": lambda: Parameter(torch.ones(4, 6)[:, ::2]),
    "of a class of the user's": lambda: Mine(torch.ones(3)),
}


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
def test_what_a_look_cannot_do_goes_the_long_way(make: Callable[[], Parameter]) -> None:
    optimizer = PagedAdamW(params := [make()])
    steps(optimizer, params, 9)
    assert not record(optimizer)


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
    assert record(optimizer)
    assert [ref() for ref in (*storages, *states)] == [None] * len([*storages, *states])
    optimizer.step()
