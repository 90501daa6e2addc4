"""A small model and training loop that several optimizer tests share."""

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from pagedopt import PagedAdamW

#: Nothing at its default and nothing zero, so that a dropped term shows.
ADAMW: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}


def model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Two linear layers with odd sizes and a convolution's 4-D weight."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        torch.nn.Linear(13, 18), torch.nn.Unflatten(1, (2, 3, 3)), torch.nn.Conv2d(2, 5, 3), torch.nn.Flatten()
    )
    return layers.to(device, dtype)


def train(
    net: torch.nn.Module, opt: Optimizer, steps: int, first: int = 0, without: Callable[[int], int] | None = None
) -> None:
    """Steps ``first`` … on data that depends on the step; ``without(step)`` names a parameter that gets no gradient."""
    params = list(net.parameters())
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(8, 13, generator=generator).to(params[0].device, params[0].dtype)
        opt.zero_grad()
        net(x).square().mean().backward()
        if without is not None and (index := without(step)) >= 0:
            params[index].grad = None
        opt.step()


def trained(
    steps: int = 2,
    kind: Any = PagedAdamW,
    hyper: dict[str, Any] = ADAMW,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[torch.nn.Module, Any]:
    """The model, and the optimizer that has trained it for so many steps."""
    net = model(dtype=dtype)
    opt = kind(net.parameters(), **hyper, **options)
    train(net, opt, steps)
    return net, opt


def step_on(opt: Optimizer, number: float) -> None:
    """A step on gradients of this number, but for what is frozen."""
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, number, requires_grad=False) if p.requires_grad else None
    opt.step()


def step_on_ones(opt: Optimizer) -> None:
    """A step on gradients of ones, but for what is frozen."""
    step_on(opt, 1)


def ready(size: Any = 3, grad: complex = 1, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """A parameter of ones, with a gradient of one number."""
    p = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    p.grad = torch.full_like(p, grad, requires_grad=False)
    return p


def stepped(
    size: Any = 3, kind: Any = PagedAdamW, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.nn.Parameter, Any]:
    """A parameter of ones, and its optimizer after a step on a gradient of ones."""
    p = ready(size, dtype=dtype)
    opt = kind([p], **options)
    opt.step()
    return p, opt


def params_of(
    sizes: Iterable[int] = (3000, 17, 1, 40_000, 0), dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Parameters of normally distributed numbers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]


def bits(params: Iterable[torch.Tensor], opt: Optimizer) -> list[torch.Tensor]:
    """Copies, on the CPU, of parameters and of their state."""
    return [t.detach().cpu().clone() for p in params for t in (p, *opt.state[p].values())]


def same(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Bit for bit, one by one."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def through_file(value: Any, weights_only: bool = True, **how: Any) -> Any:
    """What torch reads of what it has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only, **how)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest difference over the largest magnitude, over all tensors."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in pairs)
