"""The contract: hyperparameters that scenarios try."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tests.contract.scenarios import World


def switches(world: World) -> list[str]:
    """Names of hyperparameters that are on or off."""
    return [name for name in ("amsgrad", "nesterov", "maximize") if name in world.known]


def group_of(optimizer: Any, *also: str) -> dict[str, Any]:
    """The first group but for its parameters and, as the world chooses it for torch, ``foreach``."""
    away = {"params", "foreach"} - {*also}
    return {name: value for name, value in optimizer.param_groups[0].items() if name not in away}


def tried(world: World, label: str, **hyper: Any) -> None:
    """Make an optimizer and take two steps."""
    p = world.param((13, 5))
    with world.tries(label):
        opt = world.make([p], **hyper)
        group = group_of(opt, *hyper)
        world.train(opt, [p], range(2))
        world.say(f"{label}: what came of it", [p, group])


def odd_values(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """Values at the edges of what is taken and beyond, by label."""
    one, two = torch.tensor(0.5), torch.tensor([0.5, 0.25])
    here = torch.full((1,), 0.25, device=world.device)
    odd: dict[str, list[Any]] = {
        "lr": [0, 1, True, -1.0, -0.0, math.nan, math.inf, "0.1", None, one, one.double(), one.int(), two, two[:1],
               two[:0], two[:1, None], -one, here, here[0], one.numpy()[()], one.clone().requires_grad_()],
        "weight_decay": [0, -1.0, math.nan, math.inf, None, one],
        "eps": [0, -1.0, math.nan, math.inf, None, one],
        "betas": [(0, 0), (0.0, 0.0), (1.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5, -0.1), (0.5, math.nan), (0.5,), (),
                  (0.5, 0.6, 0.7), [0.5, 0.6], 0.5, None, (one, one), (one, 0.5), (0.5, one), (two, one), (one, two),
                  (two[:1], one), (here, here[0]), (one, -one), (one.double(), one.double()), (0, 0.5), (False, False)],
        "momentum": [0, 1, 2.0, -1.0, math.nan, None, one],
        "dampening": [0, 1.0, 2.0, -1.0, None, one],
        "nesterov": [True, 1, None],
        "amsgrad": [True, 1, None],
        "maximize": [True, 1, None],
        "params": [[], [world.param(), 3], [{}], torch.ones(3), None, {world.param()}],
        "unknown": [1],
    }  # fmt: skip
    for name, values in odd.items():
        for value in values if name in {*world.known, "unknown"} else []:
            wide = name == "betas" and isinstance(value, tuple) and len(value) == 2
            yield f"{name}={shown(value)}", {name: world.betas(*value) if wide else value}
    if "nesterov" in world.known:
        yield "nesterov, no dampening", {"nesterov": True, "dampening": 0}
        yield "nesterov, no momentum", {"nesterov": True, "dampening": 0, "momentum": 0}


def shown(value: Any) -> str:
    """A value in a label, the same on both sides."""
    if isinstance(value, torch.Tensor):
        on = "" if value.device.type == "cpu" else " on the device"
        grad = ", with grad" if value.requires_grad else ""
        return f"{value.dtype} {value.tolist()}{on}{grad}"
    if isinstance(value, list | tuple | set):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    return repr(value)
