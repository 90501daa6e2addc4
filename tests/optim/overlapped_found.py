"""Loops whose queued steps once had other numbers than plain ones."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from overlapped import LAYERS, Loop, linears
from torch import Tensor, nn

from tests.optim.overlapped_models import Functional, Reader


def swapped(loop: Loop) -> None:
    """Behind a recorded forward; ``swap_tensors`` asks that nobody has a weak reference to a tensor."""
    if loop.number == 0:
        loop.gradients()
        loop.models[0].zero_grad()
        with torch.no_grad():
            for p in loop.models[0].parameters():
                torch.utils.swap_tensors(p, nn.Parameter(2 * p))


FIRST, LAST = 0, 2 * LAYERS - 2


def change_places(loop: Loop) -> None:
    """The first and the last layer change their weights once: then the first has to wait for the last page."""
    net: Any = loop.models[0]
    if loop.number == 4:
        net[FIRST].weight, net[LAST].weight = net[LAST].weight, net[FIRST].weight


def only_the_last(loop: Loop) -> None:
    """In every second step only the last layers have gradients: their launches are the first ones."""
    if loop.number % 2 == 0:
        net: Any = loop.models[0]
        for p in net[: LAST - 8].parameters():
            p.grad = None


class Switched(nn.Module):
    """In evaluation it reads the weight of another module, and not its own."""

    def __init__(self, own: nn.Linear, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.other = own, [other]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            y: Tensor = self.own(x)
            return y
        return F.linear(x, self.other[0].weight, self.other[0].bias) + 0 * self.own(x)


def switched(width: int) -> list[nn.Module]:
    net: Any = linears(width)
    net[FIRST] = Switched(net[FIRST], net[LAST])
    return [net]


def switch(loop: Loop) -> None:
    net: Any = loop.models[0]
    net[FIRST].train(loop.number < 3)


class Twice(nn.Module):
    """Calls a module at two depths of the stack."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = linears(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        y: Tensor = self.net(x)
        return y


class Lazy(nn.Module):
    """A module that is not initialized, and has no memory yet, runs from the fourth forward on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net, self.lazy, self.calls = linears(width), nn.LazyLinear(width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.net(self.lazy(x) if self.calls > 3 else x)
        return y


class FastFirst(nn.Module):
    """Tries a fast way once, in the recorded forward, and goes on without it."""

    class Fast(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            raise NotImplementedError

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fast, self.tried, self.net = self.Fast(), False, linears(width)

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.net[-2]
        if not self.tried:
            self.tried = True
            with contextlib.suppress(NotImplementedError):
                x = self.fast(x, last.weight)
        y: Tensor = self.net(x @ last.weight.t())
        return y


class Moving(nn.Module):
    """Reads a bias of whichever module has it now."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.old, self.new = nn.Module(), nn.Module()
        self.old.bias = nn.Parameter(torch.zeros(3 * width * width))
        self.net = linears(width)

    def forward(self, x: Tensor) -> Tensor:
        bias: Any = (self.old if hasattr(self.old, "bias") else self.new).bias
        y: Tensor = self.net(x) + bias.view(3, -1)[:, : x.shape[-1]].sum(0) + bias.sum() * 0.01
        return y


def move(loop: Loop) -> None:
    if loop.number == 2:
        net: Any = loop.models[0]
        net.new.bias = net.old.bias
        del net.old.bias


class ReadsAnother(nn.Module):
    """Reads a module of another model."""

    def __init__(self, width: int, other: nn.Module) -> None:
        super().__init__()
        self.net, self.reader = linears(width), Reader(other)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(self.reader(x))
        return y


def two_of_which_one_reads_the_other(width: int) -> list[nn.Module]:
    other = linears(width, 3)
    return [ReadsAnother(width, other[4]), other]


def attach_the_other(loop: Loop) -> None:
    """What the first one reads of it was not noted."""
    if loop.attached and loop.number == 3:
        loop.opts[0].attach(loop.models[1])


def views_of_one(width: int) -> list[nn.Module]:
    """Their versions rise together, also when some are waited for before others; nobody has written them."""
    flat, layers = torch.randn(LAYERS, width, width) / width**0.5, [nn.Linear(width, width), nn.Tanh()]
    for weight in flat:
        layers += [nn.Linear(width, width), nn.Tanh()]
        layers[-2].weight = nn.Parameter(weight)
    return [nn.Sequential(*layers)]


def first_is_last(loop: Loop) -> list[Any]:
    net: Any = loop.models[0]
    first, *others = net[::2]
    return [loop.adamw(p for layer in (*others, first) for p in layer.parameters())]


def of_inference_mode(loop: Loop) -> None:
    """Gradients that count no writes, so that nobody could tell whether they were written."""
    with torch.inference_mode():
        made = [torch.ones_like(p) for p in loop.models[0].parameters()]
    for p, grad in zip(loop.models[0].parameters(), made, strict=True):
        p.grad = grad


INFERENCE = "parameters or gradients are tensors of torch.inference_mode, which count no writes"
RESIDENT = "no page of its state is off the device"
FOUND: dict[str, Loop] = {
    "a weight is swapped": Loop(lambda w: [Functional(w)], before=swapped),
    "parameters change places": Loop(before=change_places, enough=6),
    "the launches are others": Loop(between=only_the_last, enough=6),
    "evaluation of one module": Loop(switched, before=switch, enough=6),
    "two depths": Loop(lambda w: [Twice(w)], enough=6),
    "a module without memory": Loop(
        lambda w: [Lazy(w)], optimizers=lambda loop: [loop.adamw(loop.models[0].net.parameters())], enough=6  # type: ignore[union-attr]
    ),
    "an error of a module": Loop(lambda w: [FastFirst(w)], enough=5),
    "a parameter moves": Loop(lambda w: [Moving(w)], between=move, enough=6),
    "a model is attached later": Loop(
        two_of_which_one_reads_the_other, attach=lambda loop: loop.models[:1], before=attach_the_other, enough=7
    ),
    "views of one tensor": Loop(
        views_of_one, optimizers=first_is_last, options={"device_budget": "50%"}, enough=4, hides=False
    ),
    "gradients of inference mode": Loop(between=of_inference_mode, enough=4, hides=False, plain={INFERENCE: 4}),
    "all is resident": Loop(options={"device_budget": None}, hides=False, plain={RESIDENT: 3}),
}  # fmt: skip
