"""Parameters whose gradients are given to autograd one by one, and steps that take them within such backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from optim_support import ADAMW
from overlapped import PLACES
from torch import Tensor, nn

from pagedopt import PagedAdamW

#: The second spans pages, and shares its first and last with others.
SHAPES = ((24, 40), (70, 50), (30,), (), (300,), (17, 60), (900,))


class Held(nn.Module):
    """A module of nothing but parameters."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)


def held(dtypes: Sequence[torch.dtype] = (torch.float32,), device: str = "cpu") -> Held:
    """Parameters of these dtypes in turn; one of them lies in memory column by column."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    values[5] = values[5].t().contiguous().t()
    return Held(nn.Parameter(v.to(device, dtypes[i % len(dtypes)])) for i, v in enumerate(values))


def gradient(p: Tensor, number: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def adamw(model: nn.Module, **options: Any) -> PagedAdamW:
    """State is away, in small pages."""
    return PagedAdamW(model.parameters(), **{**ADAMW, "placement": PLACES["cpu"], "device_budget": 0, **options})


def arrive(model: nn.Module, step: int, order: Iterable[int] | None = None) -> None:
    """Backwards that give these parameters (None: all, the last one first) their gradients, one after the other."""
    params = [*model.parameters()]
    for i in reversed(range(len(params))) if order is None else order:
        if params[i].requires_grad:
            params[i].backward(gradient(params[i], i, step))


def bits(model: nn.Module, *optimizers: Any) -> list[Any]:
    """Copies of parameters and of whole state dicts."""
    values: list[Any] = [p.detach().clone() for p in model.parameters()]
    return [*values, *copy.deepcopy([opt.state_dict() for opt in optimizers])]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) and one.dtype is other.dtype if isinstance(one, Tensor) else bool(one == other)


Act = Callable[[Any, Held, int], object]


def trained(
    within: bool,
    model: Callable[[], Held] = held,
    optimizer: Callable[[Held], Any] = adamw,
    before: Act = lambda *_: None,
    behind: Act = lambda *_: None,
    order: Callable[[int], Iterable[int]] = lambda step: reversed(range(len(SHAPES))),
    steps: int = 4,
) -> list[Any]:
    """Bits in the end, of steps within backwards or behind them.

    Args:
        before, behind: what is done in front of a backward, and between it and the step.
        order: in which gradients come.
    """
    net = model()
    opt = optimizer(net)
    if within:
        opt.attach(net, overlap="backward")
    for step in range(steps):
        before(opt, net, step)
        arrive(net, step, order(step))
        behind(opt, net, step)
        opt.step()
        opt.zero_grad()
    return bits(net, opt)


def assert_same_bits(**how: Any) -> None:
    """Steps within backwards and plain ones end alike."""
    assert same(trained(True, **how), trained(False, **how))


def attached(**options: Any) -> tuple[Held, PagedAdamW]:
    model = held()
    opt = adamw(model, **options)
    opt.attach(model, overlap="backward")
    return model, opt
