"""Captured steps: a replay is a step, whatever has changed in memory."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_toys import (
    CAPTURABLE,
    KINDS,
    PLACES,
    assert_same,
    begun,
    captured,
    give,
    parameters,
)
from gpu_support import launching
from optim_support import same

from pagedopt import PagedAdamW

pytestmark = launching()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_replays_are_a_hundred_steps(kind: str, place: str) -> None:
    eager, replayed = begun(KINDS[kind], **PLACES[place]), begun(KINDS[kind], **PLACES[place])
    before = [p.detach().clone() for p in replayed[0]]
    graph = captured(replayed[1])
    torch.cuda.synchronize()
    assert same(before, replayed[0]), "a capture has updated something"
    for step in range(2, 102):
        give(eager[0], step)
        eager[1].step()
        give(replayed[0], step)
        graph.replay()
    assert_same(eager, replayed)
    replayed[1].check_capture()
    eager[1].step()
    replayed[1].step()
    assert_same(eager, replayed)


@pytest.mark.parametrize("kind", ["adamw", "amsgrad", "lion"])
def test_replays_are_within_the_contract_of_steps_that_are_not_capturable(kind: str) -> None:
    plain, replayed = begun(functools.partial(KINDS[kind], capturable=False)), begun(KINDS[kind])
    graph = captured(replayed[1])
    for step in range(2, 102):
        give(plain[0], step)
        plain[1].step()
        give(replayed[0], step)
        graph.replay()
    for p, q in zip(plain[0], replayed[0], strict=True):
        torch.testing.assert_close(q, p, rtol=2e-6, atol=2e-6)


def test_learning_rate_and_betas_that_are_tensors_change_between_replays() -> None:
    worlds = []
    for _ in range(2):
        lr, beta1, beta2 = (torch.tensor(number, device="cuda") for number in (0.03, 0.8, 0.95))
        numbers = {"lr": lr, "betas": (beta1, beta2)}
        worlds.append((numbers, *begun(functools.partial(PagedAdamW, **{**CAPTURABLE, **numbers}))))
    graph = captured(worlds[1][2])
    for step in range(2, 20):
        for numbers, params, _ in worlds:
            numbers["lr"].fill_(0.03 / step)
            numbers["betas"][0].fill_(0.5 + 0.02 * step)
            give(params, step)
        worlds[0][2].step()
        graph.replay()
    assert_same(worlds[0][1:], worlds[1][1:])


def test_a_second_optimizer_in_between_changes_nothing() -> None:
    eager, replayed = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(replayed[1])
    for step in range(2, 12):
        other = begun(KINDS["adamw"])
        captured(other[1]).replay()
        for world in (eager, replayed):
            give(world[0], step)
        eager[1].step()
        graph.replay()
    assert_same(eager, replayed)


def test_gradients_that_move_are_followed_in_stream_order() -> None:
    eager, replayed = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(replayed[1])
    for step in range(2, 12):
        give(eager[0], step, in_place=False)
        eager[1].step()
        torch.cuda._sleep(20_000_000)  # the last replay has not read its list when the next one is told
        give(replayed[0], step, in_place=False)
        replayed[1].refresh()
        graph.replay()
    assert_same(eager, replayed)


def test_a_replay_that_was_not_refreshed_reads_memory_of_its_own() -> None:
    eager, replayed = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(replayed[1])
    replayed[1].zero_grad()
    poison = [torch.full_like(p, float("nan")) for p in parameters() for _ in range(4)]
    eager[1].step()
    graph.replay()
    assert_same(eager, replayed)
    assert len(poison) == 16


def test_gradients_come_and_go_with_a_refresh() -> None:
    eager, replayed = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(replayed[1])
    for step in range(2, 10):
        for params, _ in (eager, replayed):
            give(params, step, in_place=False)
            params[step % 4].grad = None
        eager[1].step()
        replayed[1].refresh()
        graph.replay()
    assert_same(eager, replayed)


def test_what_has_changed_is_named_and_followed() -> None:
    (params, optimizer), eager = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(optimizer)
    optimizer.check_capture()
    for each in (optimizer, eager[1]):
        each.param_groups[0]["lr"] = 0.007
    with pytest.raises(RuntimeError, match=r"lr of group 0 has changed"):
        optimizer.check_capture()
    for world in ((params, optimizer), eager):
        give(world[0], 5, in_place=False)
    with pytest.raises(
        RuntimeError, match=r"gradient of parameter 0 has moved; the gradient of parameter 1 has moved.*lr of group 0"
    ):
        optimizer.check_capture()
    optimizer.refresh()
    optimizer.check_capture()
    graph.replay()
    eager[1].step()
    assert_same((params, optimizer), eager)
    params[1].grad = params[1].grad.clone()  # type: ignore[union-attr]
    with pytest.warns(RuntimeWarning, match="captured step was recorded, the gradient of parameter 1 has moved"):
        optimizer.step()


def _replace_state(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].clone()


def _add_group(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device="cuda"))]})


def _move_parameter(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    params[1].data = params[1].data.clone()


VOIDS = {
    "state 'exp_avg' of parameter 0 was replaced": _replace_state,
    "groups, their parameters, their rules or formats are others": _add_group,
    "parameter 1 has moved": _move_parameter,
}


@pytest.mark.parametrize("text", VOIDS)
def test_what_no_refresh_can_follow_makes_a_capture_void(text: str) -> None:
    params, optimizer = begun(KINDS["adamw"])
    graph = captured(optimizer)
    VOIDS[text](params, optimizer)
    with pytest.raises(RuntimeError, match=text):
        optimizer.check_capture()
    with pytest.raises(RuntimeError, match=f"is void: .*{text}.*Capture again"):
        optimizer.refresh()
    with pytest.warns(RuntimeWarning, match=text):
        optimizer.step()
    del graph
    gc.collect()
    optimizer.check_capture()


MOVES: dict[str, Callable[[Any], Any]] = {
    "set_device_budget": lambda optimizer: optimizer.set_device_budget("10%"),
    "spill": lambda optimizer: optimizer.spill(),
    "unspill": lambda optimizer: optimizer.unspill(),
}


@pytest.mark.parametrize("move", MOVES)
def test_state_does_not_move_while_a_graph_writes_to_it(move: str) -> None:
    _, optimizer = begun(KINDS["adamw"], **PLACES["in place"])
    graph = captured(optimizer)
    before = optimizer.memory_report().by_place
    with pytest.raises(RuntimeError, match=f"{move}.*delete the graph first"):
        MOVES[move](optimizer)
    assert optimizer.memory_report().by_place == before
    del graph
    gc.collect()
    MOVES[move](optimizer)


def test_a_whole_iteration_is_captured() -> None:
    def world() -> tuple[torch.nn.Module, Any, torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).cuda()
        return net, PagedAdamW(net.parameters(), **CAPTURABLE), torch.zeros(32, 64, device="cuda")

    def iteration(net: torch.nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        net(batch).square().mean().backward()
        optimizer.step()

    eager, replayed = world(), world()
    batches = torch.randn(20, 32, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for each in (eager, replayed):
        with torch.cuda.stream(side):
            for batch in batches[:3]:
                each[2].copy_(batch)
                iteration(*each)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    replayed[1].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        iteration(*replayed)
    for batch in batches[3:]:
        eager[2].copy_(batch)
        iteration(*eager)
        replayed[2].copy_(batch)
        graph.replay()
    assert same(list(eager[0].parameters()), list(replayed[0].parameters()))


def test_nadam_s_own_numbers_lie_on_the_device() -> None:
    params, optimizer = begun(KINDS["nadam"])
    assert all(optimizer.state[p]["mu_product"].is_cuda for p in params)
