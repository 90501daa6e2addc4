"""What users do to the modules of an attached model in the middle of training; it changes what is read, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from overlapped import LAYERS, Loop
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

Join = Callable[[nn.Sequential], Any]


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 1.25 * weight


class Around(nn.Module):
    """A wrapped layer, whose weight is read and which is not called."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 1.5 * self.base.weight)


def parametrized(net: nn.Sequential) -> None:
    for i in (0, 20, -2):
        parametrize.register_parametrization(net[i], "weight", Scaled())


def wrap(net: nn.Sequential) -> None:
    net[4] = Around(net[4])  # type: ignore[arg-type]
    net[40] = Around(net[40])  # type: ignore[arg-type]


def clear(net: nn.Sequential) -> None:
    """As libraries do that have put hooks there themselves."""
    for module in net[2:30]:
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


def clear_behind(net: nn.Sequential) -> None:
    """Then nobody tells the end of the forward."""
    net._forward_hooks.clear()


def own_in_front(net: nn.Sequential) -> None:
    for module in net[2:20:2]:
        module.register_forward_pre_hook(lambda module, args: (args[0] * (1 + module.weight.mean()),), prepend=True)


def other_in_front(net: nn.Sequential) -> None:
    """A hook that reads another module."""
    last = net[-2]
    net[2].register_forward_pre_hook(lambda _, args: (args[0] + last.weight.mean(),), prepend=True)


def replace_weight(net: nn.Sequential) -> None:
    """Another parameter in the place of one; the optimizer still has the old one, and gets none anew."""
    net[10].weight = nn.Parameter(0.5 * net[10].weight.detach())


def tie(net: nn.Sequential) -> None:
    net[2].weight = net[-2].weight


#: By name: what is done, and whether it reads or writes parameters by hand, and so waits.
JOINS: dict[str, tuple[Join, bool]] = {
    "parametrization": (parametrized, True),
    "spectral_norm": (lambda net: parametrizations.spectral_norm(net[-2]), True),
    "a wrapped layer": (wrap, False),
    "cleared hooks": (clear, False),
    "cleared hooks behind": (clear_behind, False),
    "a hook in front": (own_in_front, False),
    "a hook in front that reads another": (other_in_front, False),
    "another weight": (replace_weight, True),
    "a weight that is tied": (tie, False),
}  # fmt: skip


def without_biases(width: int) -> list[nn.Module]:
    """A bias, updated behind the weight of its layer, would make its reader wait for that as well."""
    net = nn.Sequential(*[each for _ in range(LAYERS) for each in (nn.Linear(width, width, bias=False), nn.Tanh())])
    for layer in net[::2]:
        nn.init.xavier_normal_(layer.weight, gain=nn.init.calculate_gain("tanh"))  # else nothing comes out at the end
    return [net]


def penalty(loop: Loop, y: Tensor) -> Tensor:
    """A loss that reads parameters behind the forward."""
    return y.square().mean() + 1e-3 * sum(p.square().sum() for m in loop.models for p in m.parameters())


def loop_of(name: str, queued: bool) -> Loop:
    """A loop in which it is done while a step is queued, or when none is."""
    join, waits = JOINS[name]

    def act(loop: Loop) -> None:
        if loop.number == 2:
            if waits or not queued:
                loop.opts[0].wait()
            with torch.random.fork_rng():
                join(loop.models[0])  # type: ignore[arg-type]

    return Loop(without_biases, behind=act, loss=penalty)
