"""Queued steps on a played card: what a forward reads was updated, and nobody comes too early at what a step uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from played_runs import Ends, Order, Run, ends_of, every_order, play, some_orders
from staged import both_ways
from torch import nn

pytestmark = [both_ways, pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")]
WIDTH = 40
Between = Callable[[Run, nn.Module, Any], None]


def nothing(run: Run, model: nn.Module, optimizer: Any) -> None:
    """The forward comes next."""


def train(run: Run, between: Between = nothing, count: int = 4) -> Ends:
    torch.default_generator.manual_seed(5)
    layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(run.device)
    optimizer = run.adamw(model.parameters(), device_budget=0)
    losses = []
    if run.card is not None:
        optimizer.attach(model)
    for _ in range(count):
        loss = model(run.numbers(4, WIDTH)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        between(run, model, optimizer)
    if run.card is not None:
        optimizer.wait()
        report = optimizer.overlap_report()
        assert report.hidden + report.waited > 5
        assert report.hidden or between is not nothing
    return [*(loss.cpu() for loss in losses), *ends_of(model.parameters(), optimizer)]


@every_order
def test_the_forward_hides_a_step(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    play(monkeypatch, train, order)


def wait_and_read(run: Run, model: nn.Module, optimizer: Any) -> None:
    """State and parameters, as for a checkpoint."""
    optimizer.wait()
    for p in model.parameters():
        for t in optimizer.state[p].values():
            t.sum()


def wait_elsewhere(run: Run, model: nn.Module, optimizer: Any) -> None:
    """On a stream that is not the one of the gradients."""
    other = run.stream()
    with run.on(other):
        optimizer.wait()
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].sum()
    run.wait(None, other)


def forward_elsewhere(run: Run, model: nn.Module, optimizer: Any) -> None:
    other = run.stream()
    with run.on(other), torch.no_grad():
        model(torch.ones(2, WIDTH, device=run.device)).sum()
    run.wait(None, other)


def move(run: Run, model: nn.Module, optimizer: Any) -> None:
    if run.card is not None:
        optimizer.set_device_budget("16KiB")


@pytest.mark.parametrize("between", [wait_and_read, wait_elsewhere, forward_elsewhere, move], ids=lambda f: f.__name__)
@some_orders
def test_what_is_done_before_the_next_forward(monkeypatch: pytest.MonkeyPatch, between: Between, order: Order) -> None:
    play(monkeypatch, lambda run: train(run, between), order)
