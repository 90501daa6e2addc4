"""Captured steps on a played card: replays and refreshes are in order, and are the steps of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedopt import ema
from tests.card.runs import Ends, Run, ends_of, played, some_orders

SIZES = (3000, 17, 5)


@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget": "16KiB", "host_access": "in_place"}, {"device_budget": "16KiB"},
     {"device_budget": 0, "after": ema(0.9)}],
    ids=lambda options: "-".join(map(str, options.values())),
)  # fmt: skip
@played(some_orders)
def test_each_replay_has_the_gradients_of_its_refresh(run: Run, options: dict[str, Any]) -> Ends:
    """More of them than the host has buffers for; one of them was absent in the capture."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, capturable=True, **options)
    run.step(params, optimizer)
    run.gradients(params)
    params[1].grad = None
    replay = run.captured(optimizer)
    for number in range(7):
        run.gradients(params)
        optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        run.refresh(optimizer)
        replay()
    return ends_of(params, optimizer)


@played(some_orders)
def test_replays_read_gradients_of_another_stream(run: Run) -> Ends:
    """Which goes on, and lets go of old ones, while they are read."""
    params, other = run.params(SIZES), run.stream()
    optimizer = run.adamw(params, capturable=True)
    run.step(params, optimizer)
    replay = run.captured(optimizer)
    for _ in range(4):
        run.gradients(params)
        run.wait(other, None)
        with run.on(other):
            run.refresh(optimizer)
            replay()
    run.wait(None, other)
    return ends_of(params, optimizer)


@played(some_orders)
def test_capturable_steps_of_two_streams(run: Run) -> Ends:
    params, streams = run.params(SIZES), [None, run.stream()]
    optimizer = run.adamw(params, capturable=True)
    for number in range(4):
        run.wait(streams[number % 2], streams[(number + 1) % 2])
        with run.on(streams[number % 2]):
            run.step(params, optimizer)
    run.wait(None, streams[1])
    return ends_of(params, optimizer)


@played(some_orders)
def test_a_graph_that_is_gone_has_kept_what_its_replays_touch(run: Run) -> Ends:
    params = run.params(SIZES)
    optimizer = run.adamw(params, capturable=True)
    for _ in range(2):
        run.step(params, optimizer)
        run.gradients(params)
        replay = run.captured(optimizer)
        replay()
        del replay
    del optimizer
    return [p.detach().cpu() for p in params]


# --- step counts that lie on the card are read there in each step, whoever has written them ---------------------------


FLAGS: list[dict[str, Any]] = [{"fused": True}, {"capturable": True}, {"fused": True, "capturable": True}]
PLACES: list[dict[str, Any]] = [{}, {"device_budget": 0}, {"device_budget": "16KiB", "host_access": "in_place"}]


def written(optimizer: Any, p: torch.Tensor, value: float) -> None:
    """As ``dist.broadcast`` writes it: no version counter goes up."""
    count = optimizer.state[p]["step"]
    before = count._version
    count.data.fill_(value)
    assert count._version == before


@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@played(some_orders)
def test_counts_that_were_broadcast_are_followed(run: Run, flags: dict[str, Any], options: dict[str, Any]) -> Ends:
    params = run.params((6000, 17, 5))
    optimizer = run.adamw(params, **flags, **options)
    for number in range(4):
        run.step(params, optimizer)
        if number == 1:
            written(optimizer, params[0], 100)
            written(optimizer, params[2], 40)
    counts = [optimizer.state[p]["step"] for p in params]
    assert [t.item() for t in counts] == [102, 4, 42]
    return ends_of(params, optimizer)


@played(some_orders)
def test_counts_of_a_device_that_no_flag_has_put_there_are_followed(run: Run) -> Ends:
    """One that two parameters share, and those that a user has replaced."""
    params = run.params(SIZES)
    optimizer = run.adamw(params)
    for number in range(4):
        run.step(params, optimizer)
        if number == 0:
            shared = optimizer.state[params[0]]["step"].to(run.device)
            for p in params[:2]:
                optimizer.state[p]["step"] = shared
            optimizer.state[params[2]]["step"] = optimizer.state[params[2]]["step"].to(run.device)
        if number == 1:
            written(optimizer, params[0], 100)
            written(optimizer, params[2], 40)
    assert [optimizer.state[p]["step"].item() for p in params] == [104, 104, 42]
    return ends_of(params, optimizer)


@played(some_orders)
def test_a_queued_step_reads_its_counts_there(run: Run) -> Ends:
    model, optimizer = run.net(fused=True)
    for _ in range(4):
        run.backward(model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        for p in model.parameters():
            written(optimizer, p, 20)
    if run.card is not None:
        report = optimizer.overlap_report()
        assert report.waited
        assert not report.plain
    return ends_of(model.parameters(), optimizer)


@pytest.mark.filterwarnings("ignore:this step was not queued:RuntimeWarning")
@played(first=(3, 2, 1, 0))
def test_a_step_that_reads_a_learning_rate_there_is_not_queued(run: Run) -> Ends:
    """It would read what a schedule has made of it since."""
    model, optimizer = run.net(fused=True)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.01, dtype=torch.float64).to(run.device)
    for _ in range(4):
        run.backward(model)
        optimizer.step()
        rate.mul_(0.5)
        optimizer.zero_grad()
    if run.card is not None:
        assert optimizer.overlap_report().plain == {"a hyperparameter is a tensor that the device reads": 4}
    return ends_of(model.parameters(), optimizer)
