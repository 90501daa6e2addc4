"""Captured steps on a played card: replays and refreshes are in order, and are the steps of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from played_runs import Ends, Order, Run, ends_of, play, some_orders

SIZES = (3000, 17, 5)


def captured(run: Run, optimizer: Any) -> Any:
    """The graph of a step; on a CPU what takes one."""
    if run.card is None:
        return optimizer.step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget": "16KiB", "host_access": "in_place"}, {"device_budget": "16KiB"}, {"device_budget": 0}],
    ids=str,
)
@some_orders
def test_each_replay_has_the_gradients_of_its_refresh(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: Order
) -> None:
    """More of them than the host has buffers for."""

    def act(run: Run) -> Ends:
        params = run.params(SIZES)
        optimizer = run.adamw(params, capturable=True, **options)
        run.gradients(params)
        optimizer.step()
        replay = captured(run, optimizer)
        for number in range(7):
            run.gradients(params)
            optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
            if run.card is not None:
                optimizer.refresh()
            replay()
        return ends_of(params, optimizer)

    play(monkeypatch, act, order)


@some_orders
def test_replays_read_gradients_of_another_stream(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    """Which goes on, and lets go of old ones, while they are read."""

    def act(run: Run) -> Ends:
        params, other = run.params(SIZES), run.stream()
        optimizer = run.adamw(params, capturable=True)
        run.gradients(params)
        optimizer.step()
        replay = captured(run, optimizer)
        for _ in range(4):
            run.gradients(params)
            run.wait(other, None)
            with run.on(other):
                if run.card is not None:
                    optimizer.refresh()
                replay()
        run.wait(None, other)
        return ends_of(params, optimizer)

    play(monkeypatch, act, order)


@some_orders
def test_capturable_steps_of_two_streams(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    def act(run: Run) -> Ends:
        params, streams = run.params(SIZES), [None, run.stream()]
        optimizer = run.adamw(params, capturable=True)
        for number in range(4):
            run.wait(streams[number % 2], streams[(number + 1) % 2])
            with run.on(streams[number % 2]):
                run.gradients(params)
                optimizer.step()
        run.wait(None, streams[1])
        return ends_of(params, optimizer)

    play(monkeypatch, act, order)


@some_orders
def test_a_graph_that_is_gone_has_kept_what_its_replays_touch(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    def act(run: Run) -> Ends:
        params = run.params(SIZES)
        optimizer = run.adamw(params, capturable=True)
        for _ in range(2):
            run.gradients(params)
            optimizer.step()
            run.gradients(params)
            replay = captured(run, optimizer)
            replay()
            del replay
        del optimizer
        return [p.detach().cpu() for p in params]

    play(monkeypatch, act, order)
