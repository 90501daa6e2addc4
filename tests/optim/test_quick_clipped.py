"""Clipped and scaled steps in one compiled call: to the bit what the long way does, norms included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from calls import calls
from gpu_support import DEVICES
from torch.nn import Parameter

from pagedopt import PagedAdamW, PagedSGD
from tests.acts import nothing
from tests.optim.clipped import params_of
from tests.optim.quick_steps import compiled_alone, nothing_is_queued
from tests.specs import BY_STATE
from tests.world import (
    INT8,
    RESIDENT,
    SIDES,
    Act,
    Side,
    World,
    Worlds,
    give,
    one_group,
    parameters,
    record,
    steps,
)

__all__ = ["nothing_is_queued"]  # fixtures
pytestmark = compiled_alone


def another_norm(world: World) -> None:
    if world.ours:
        world.optimizer.max_grad_norm = 0.25 * (world.count + 1)


CASES_OF_NORMS = [
    pytest.param(name, side, norm, act, id=f"{name}-{side.name}-{norm}-{act.__name__}")
    for name in BY_STATE
    if name != "amsgrad"
    for side in (RESIDENT, INT8[0])
    for norm in (0.25, 1e9, float("inf"))
    for act in (nothing, another_norm)
]


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite(value: float, device: str) -> None:
    def act(world: World) -> None:
        if world.count == 6:
            world.params[1].grad.view(-1)[0] = value  # type: ignore[union-attr]

    worlds = Worlds(BY_STATE["momentum"], *SIDES, clip=1.0, device=device).step(9, act)
    assert worlds.ours[0].quick >= 4
    assert not worlds.over


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("infinite", [(), (6, 7)], ids=["finite", "infinite"])
def test_scaled_steps(clip: float | None, infinite: tuple[int, ...]) -> None:
    def act(world: World) -> None:
        if world.count in infinite:
            world.params[2].grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]

    ours = Worlds(BY_STATE["adamw"], *SIDES, clip=clip, scale=64.0).step(12, act).ours
    assert ours[0].quick >= 8 - len(infinite)
    assert [world.state[world.params[0]]["step"] for world in ours] == [12 - len(infinite)] * len(ours)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_few_calls(device: str) -> None:
    params = parameters(device)
    optimizer = PagedAdamW(params, max_grad_norm=0.5)
    steps(optimizer, params, 9)
    assert record(optimizer)
    give(params, 20)
    assert len(calls(optimizer.step)) <= {"cpu": 30, "cuda": 62}[device]


def test_within_a_backward_it_is_refused() -> None:
    params = parameters()
    optimizer = PagedAdamW(params, max_grad_norm=0.5)
    steps(optimizer, params, 9)
    assert record(optimizer)
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"max_grad_norm is 0\.5, and step"):
        leaf.sum().backward()
    assert optimizer.state[params[0]]["step"] == 9


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
