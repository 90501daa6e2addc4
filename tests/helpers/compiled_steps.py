"""Small optimizers for tests of compiled steps, what they end in, and what the operator of their steps is handed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pagedopt import PagedAdamW, PagedOptimizer

Made = tuple[nn.Module, PagedOptimizer]
Ended = list[torch.Tensor]


def made(make: Callable[..., PagedOptimizer] = PagedAdamW, seed: int = 0, **options: Any) -> Made:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, make(model.parameters(), lr=1e-2, **options)


def backward(model: nn.Module, i: int) -> None:
    model(torch.full((4, 7), 0.1 * (i + 1))).square().sum().backward()


def ended(model: nn.Module, optimizer: PagedOptimizer) -> Ended:
    """Parameters and state, as they are now."""
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


def equal(got: Ended, want: Ended) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def operator() -> Any:
    from pagedopt.optim.registered_step import step_

    return step_


def arguments(model: nn.Module, optimizer: PagedOptimizer) -> tuple[Ended, Ended, int]:
    from pagedopt.optim.registered_step import handle_of

    params = [*model.parameters()]
    optimizer._shown_groups = optimizer.param_groups  # as Dynamo was shown
    handle = handle_of(optimizer, tuple(range(len(params))))
    return [p.detach() for p in params], [p.grad for p in params if p.grad is not None], handle


def graphs() -> int:
    """How many graphs torch.compile has made."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
