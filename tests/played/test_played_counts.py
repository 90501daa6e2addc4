"""Step counts that lie on a played card are read there in each step, whoever has written them, and by whatever way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from played_runs import Ends, Order, Run, ends_of, play, some_orders
from torch import nn

SIZES = (3000, 17, 5)
FLAGS: list[dict[str, Any]] = [{"fused": True}, {"capturable": True}, {"fused": True, "capturable": True}]
PLACES: list[dict[str, Any]] = [
    {}, {"device_budget": 0}, {"device_budget": "16KiB", "host_access": "in_place"}, {"state_format": "int8"},
]  # fmt: skip


def written(optimizer: Any, p: torch.Tensor, value: float) -> None:
    """As ``dist.broadcast`` writes it: no version counter goes up."""
    count = optimizer.state[p]["step"]
    before = count._version
    count.data.fill_(value)
    assert count._version == before


@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@some_orders
def test_counts_that_were_broadcast_are_followed(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], options: dict[str, Any], order: Order
) -> None:
    def act(run: Run) -> Ends:
        params = run.params((6000, 17, 5))
        optimizer = run.adamw(params, **flags, **options)
        for number in range(4):
            run.gradients(params)
            optimizer.step()
            if number == 1:
                written(optimizer, params[0], 100)
                written(optimizer, params[2], 40)
        counts = [optimizer.state[p]["step"] for p in params]
        assert [t.item() for t in counts] == [102, 4, 42]
        if "state_format" in options:
            return [p.detach().cpu() for p in params]
        return ends_of(params, optimizer)

    play(monkeypatch, act, order)


@some_orders
def test_counts_of_a_device_that_no_flag_has_put_there_are_followed(
    monkeypatch: pytest.MonkeyPatch, order: Order
) -> None:
    """One that two parameters share, and those that a user has replaced."""

    def act(run: Run) -> Ends:
        params = run.params(SIZES)
        optimizer = run.adamw(params)
        for number in range(4):
            run.gradients(params)
            optimizer.step()
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

    play(monkeypatch, act, order)


@some_orders
def test_a_queued_step_reads_its_counts_there(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    def act(run: Run) -> Ends:
        torch.default_generator.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3))).to(run.device)
        optimizer = run.adamw(model.parameters(), device_budget=0, fused=True)
        if run.card is not None:
            optimizer.attach(model)
        for _ in range(4):
            model(run.numbers(4, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.card is not None:
                optimizer.wait()
            for p in model.parameters():
                written(optimizer, p, 20)
        if run.card is not None:
            report = optimizer.overlap_report()
            assert report.waited
            assert not report.plain
        return ends_of(model.parameters(), optimizer)

    play(monkeypatch, act, order)


@pytest.mark.filterwarnings("ignore:this step was not queued:RuntimeWarning")
def test_a_step_that_reads_a_learning_rate_there_is_not_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read what a schedule has made of it since."""

    def act(run: Run) -> Ends:
        torch.default_generator.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3))).to(run.device)
        optimizer = run.adamw(model.parameters(), device_budget=0, fused=True)
        rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.01, dtype=torch.float64).to(run.device)
        if run.card is not None:
            optimizer.attach(model)
        for _ in range(4):
            model(run.numbers(4, 40)).square().mean().backward()
            optimizer.step()
            rate.mul_(0.5)
            optimizer.zero_grad()
        if run.card is not None:
            assert optimizer.overlap_report().plain == {"a hyperparameter is a tensor that the device reads": 4}
        return ends_of(model.parameters(), optimizer)

    play(monkeypatch, act, {"first": (3, 2, 1, 0)})
