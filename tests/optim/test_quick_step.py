"""Steps in one compiled call: to the bit what the long way does, whatever users edit between two steps.

The oracle is the same optimizer whose looks are Python's.  An edit is made to both, while the compiled call is in use.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from edits import give, groups_of, parameters
from edits_check import World, edits_for
from gpu_support import DEVICES
from looks import compiled_alone
from often import MARKS, long_but
from optim_support import ADAMW
from quick_twins import go_on, go_on_edited, is_quick, nothing_is_queued, pair, python_s, same, train
from torch.nn import Parameter

from pagedopt import PagedAdamW, PagedLion, PagedSGD
from tests.optim.specs import BY_STATE as CASES
from tests.outside.nadam import NAdam

__all__ = ["nothing_is_queued"]  # fixtures
pytestmark = compiled_alone


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
    go_on_edited(ours, other, found, chance)


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


@pytest.mark.parametrize("seed", range(6))
def test_values_of_groups_that_change_now_and_then(seed: int) -> None:
    """Those that were new in the last step are taken before the look, others once it has found them."""
    both = []
    for python in (False, True):
        chance, params = random.Random(seed), parameters()
        optimizer = PagedAdamW(groups_of(params), **ADAMW)
        if python:
            python_s(optimizer)

        def act(optimizer: Any, step: int, chance: random.Random = chance) -> None:
            for group in optimizer.param_groups:
                if chance.random() < 0.5:
                    group["lr"] = chance.random()
                if chance.random() < 0.2:
                    group["weight_decay"] = chance.choice([0.25, 1, True, np.float32(0.1)])
                if chance.random() < 0.1:
                    group["maximize"] = not group["maximize"]

        taken = train(optimizer, params, act, steps=40)
        assert python or taken >= 30
        both.append(World(optimizer, params))
    same(*both)


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
    assert ours._quick.patience.wait > 4
