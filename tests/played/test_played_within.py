"""Steps within the backward on a played card: gradients, pages and parameters, each in order, and the bits of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pagedopt.optim.overlap import side_stream
from pagedopt.optim.overlap.within import Within
from tests.card.runs import Ends, Order, Run, ends_of, play, some_orders
from tests.card.tensors import _Functions

WIDTH = 40
Act = Callable[[Run, nn.Module, Any, int], object]


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return y


def layers(width: int) -> nn.Module:
    return nn.Sequential(*[each for _ in range(3) for each in (nn.Linear(width, width), nn.Tanh())])


def nothing(run: Run, model: nn.Module, optimizer: Any, number: int) -> None:
    """The next forward comes at once."""


def train(
    run: Run,
    make: Callable[[int], nn.Module] = layers,
    before: Act = nothing,
    width: int = WIDTH,
    part: Callable[[nn.Module, int], nn.Module] = lambda model, number: model,
    **options: Any,
) -> Ends:
    torch.default_generator.manual_seed(5)
    model = make(width).to(run.device)
    optimizer = run.adamw(model.parameters(), **options)
    losses = []
    run.attach(optimizer, model, overlap="backward")
    for number in range(4):
        before(run, model, optimizer, number)
        loss = part(model, number)(run.numbers(4, width)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        taken = all(p.grad is None for p in model.parameters())
        assert taken or run.card is None, "the backward has taken them"
        optimizer.step()
        optimizer.zero_grad()
    return [*(loss.cpu() for loss in losses), *ends_of(model.parameters(), optimizer)]


def play_here(monkeypatch: pytest.MonkeyPatch, order: Order, **how: Any) -> None:
    """Play a training.  torch puts function modes away in a backward; its hooks see the card all the same."""
    came = Within.gradient_came

    def act(run: Run) -> Ends:
        def gradient_came(self: Within, p: torch.Tensor) -> None:
            with _Functions(run.card.torch):
                came(self, p)

        with monkeypatch.context() as patched:
            if run.card is not None:
                patched.setattr(Within, "gradient_came", gradient_came)
            return train(run, **how)

    play(monkeypatch, act, order)


STATES: list[dict[str, Any]] = [
    {"device_budget": 0}, {"device_budget": "16KiB"}, {"device_budget": 0, "state_format": "int8"}, {},
    {"device_budget": 0, "host_access": "in_place"},
]  # fmt: skip


@pytest.mark.parametrize("held", [0, 1 << 30])
@pytest.mark.parametrize("options", STATES, ids=str)
@some_orders
def test_a_backward_takes_the_step(monkeypatch: pytest.MonkeyPatch, order: Order, options: Any, held: int) -> None:
    monkeypatch.setattr(side_stream, "HELD", held)
    play_here(monkeypatch, order, **options)


def some_layers(model: nn.Module, number: int) -> nn.Module:
    """The last layer has no gradient in every second backward."""
    return model[:4] if number % 2 else model  # type: ignore[index]


def load(run: Run, model: nn.Module, optimizer: Any, number: int) -> None:
    """State that is written on the main stream is there before its pages are fetched."""
    if number == 2:
        optimizer.load_state_dict(optimizer.state_dict())
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].mul_(0.5)


def move_to_and_fro(run: Run, model: nn.Module, optimizer: Any, number: int) -> None:
    """The slots are other ones then."""
    if number == 2:
        optimizer.set_device_budget(None)
        optimizer.set_device_budget(0)


def step_elsewhere(run: Run, model: nn.Module, optimizer: Any, number: int) -> None:
    """Gradients that the backward has left, and a step, on another stream."""
    other = run.stream()
    run.wait(other, None)
    with run.on(other):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    run.wait(None, other)


def backward_elsewhere(run: Run, model: nn.Module, optimizer: Any, number: int) -> None:
    """Its gradients are given back to that stream."""
    other = run.stream()
    run.wait(other, None)
    with run.on(other):
        model(run.numbers(4, WIDTH)).square().mean().backward()
    run.wait(None, other)
    optimizer.step()
    optimizer.zero_grad()
    with run.on(other):
        torch.ones(64, WIDTH, device=run.device).mul_(2)
    run.wait(None, other)


def read_before_step(run: Run, model: nn.Module, optimizer: Any, number: int) -> None:
    model(run.numbers(4, WIDTH)).square().mean().backward()
    optimizer.wait()
    for p in model.parameters():
        p.detach().sum()
    optimizer.step()
    optimizer.zero_grad()


CASES: dict[str, dict[str, Any]] = {
    "a gradient is the sum of two": {"make": Tied},
    "some parameters have none": {"part": some_layers},
    "some have none, half is resident": {"part": some_layers, "device_budget": "50%"},
    "a parameter in many pages": {"width": 160},
    "state is loaded": {"before": load},
    "pages move to and fro": {"before": move_to_and_fro},
    "a plain step elsewhere": {"before": step_elsewhere},
    "a backward elsewhere": {"before": backward_elsewhere},
    "parameters are read before step()": {"before": read_before_step},
}


@pytest.mark.parametrize("case", CASES)
@some_orders
def test_what_comes_between(monkeypatch: pytest.MonkeyPatch, order: Order, case: str) -> None:
    play_here(monkeypatch, order, **{"device_budget": 0, **CASES[case]})
