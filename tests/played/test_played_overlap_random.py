"""Attached models that are made and used at random on a played card: the bits are those of plain steps on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from often import long_but
from torch import nn

from tests.card.runs import Ends, Run, ends_of, play

pytestmark = [
    pytest.mark.filterwarnings("ignore:this step was not queued"),
    pytest.mark.filterwarnings("ignore:.* parameters of the optimizer are in no attached model"),
]
WIDTH = 24
Act = Callable[[Run, "Net", Any], Any]


class Net(nn.Module):
    """Layers in the order of their calls, of which some read a weight of another module, or are skipped at times."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(rng.randint(2, 5)))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if rng.random() < 0.3:
            self.layers[-1].weight = self.layers[0].weight
        self.reads = rng.random() < 0.4  # the model reads the last layer's weight first
        self.order = rng.sample(range(len(self.layers)), len(self.layers))
        self.skips, self.calls = rng.random() < 0.3, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.reads:
            x = F.linear(x, self.layers[-1].weight).tanh()
        for i in self.order[: len(self.order) - (self.skips and self.calls % 2)]:
            x = self.layers[i](x).tanh()
        return x * self.scale


def forward_elsewhere(run: Run, net: Net, optimizer: Any) -> None:
    other = run.stream()
    if run.card is not None and optimizer._overlap.queued is None:
        run.wait(other, None)  # as behind any step that is not queued
    with run.on(other), torch.no_grad():
        net(torch.ones(2, WIDTH, device=run.device)).sum()
    run.wait(None, other)


def evaluate(run: Run, net: Net, optimizer: Any) -> None:
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, WIDTH, device=run.device))
    net.train()


def child(run: Run, net: Net, optimizer: Any) -> None:
    """A part alone, for which others of the model are waited for before."""
    optimizer.wait()
    net.layers[0](torch.ones(2, WIDTH, device=run.device)).sum()


def grow(run: Run, net: Net, optimizer: Any) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(run.device)
    net.order.append(len(net.layers))
    net.layers.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters())})


def attach_again(run: Run, net: Net, optimizer: Any) -> None:
    optimizer.detach()
    run.attach(optimizer, net)


def budget(run: Run, net: Net, optimizer: Any) -> None:
    optimizer.set_device_budget("8KiB" if net.calls % 2 else 0)


def clear_hooks(run: Run, net: Net, optimizer: Any) -> None:
    net.layers[0]._forward_pre_hooks.clear()


def scale_by_hand(run: Run, net: Net, optimizer: Any) -> None:
    with optimizer.waited(), torch.no_grad():
        net.scale.mul_(0.9)


ACTS: tuple[Act, ...] = (
    lambda run, net, optimizer: None,
    lambda run, net, optimizer: optimizer.wait(),
    lambda run, net, optimizer: net.state_dict(),
    lambda run, net, optimizer: optimizer.state_dict(),
    lambda run, net, optimizer: net.layers[0].requires_grad_(net.calls % 2 == 0),
    lambda run, net, optimizer: net.double().float(),
    lambda run, net, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda run, net, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    forward_elsewhere, evaluate, child, grow, attach_again, budget, clear_hooks, scale_by_hand,
)  # fmt: skip


def act_of(seed: int, graphs: bool) -> Callable[[Run], Ends]:
    """A training whose model and acts follow from a seed."""

    def act(run: Run) -> Ends:
        rng = random.Random(seed)
        torch.default_generator.manual_seed(seed)
        options = rng.choice([{}, {}, {"state_format": "int8"}, {"max_grad_norm": 0.1}, {"state_format": "bfloat16"}])
        net = Net(rng).to(run.device)
        optimizer = run.adamw(net.parameters(), device_budget=0, **options)
        optimizer.store.graphs.wanted = graphs
        run.attach(optimizer, net)
        losses = []
        for _ in range(rng.randint(3, 7)):
            for _ in range(rng.choice([1, 1, 2])):
                loss = net(run.numbers(4, WIDTH)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            if rng.random() < 0.2:
                net.layers[-1].bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
            rng.choice(ACTS)(run, net, optimizer)
        optimizer.wait()
        return [
            *(loss.cpu() for loss in losses),
            *ends_of((p for p in net.parameters() if p in optimizer.state), optimizer),
        ]

    return act


@pytest.mark.parametrize("seed", long_but(range(530), lambda seed: seed < 6))
def test_at_random(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    first = random.Random(seed).sample(range(4), 4)
    order = {"early": True} if seed % 5 == 4 else {"first": tuple(first)}
    play(monkeypatch, act_of(seed, graphs=seed % 3 > 0), order)
