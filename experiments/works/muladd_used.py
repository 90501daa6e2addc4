"""An operator between two of torch's own, in every use that torch has for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from experiments.works.graph import captured
from experiments.works.muladd import Operator

C = 0.5
CALLED, DIFFERENTIATED, COMPILED, TRAINED, EXPORTED, CAPTURED, BATCHED = USES = (
    "called", "differentiated", "compiled", "compiled and differentiated", "exported", "captured", "batched by vmap",
)  # fmt: skip


class Exported(torch.nn.Module):
    """A module around an operator."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Call it between two operators of torch's."""
        return between(self.operator, a, b)


def between(operator: Operator, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The operator between two of torch's own."""
    return torch.relu(operator(torch.cos(a), b, C))


def used(use: str, op: Operator, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """What comes of a use: values, or gradients."""
    if use == CALLED:
        return [between(op, a, b)]
    if use == EXPORTED:
        return [torch.export.export(Exported(op), (a, b)).module()(a, b)]
    if use == CAPTURED:
        replay = captured(lambda: between(op, a, b))
        return [replay().clone()]
    if use == BATCHED:
        return [torch.vmap(lambda a, b: op(a, b, C), in_dims=(0, None))(a, b[0])]
    call: Callable[..., torch.Tensor] = between
    if use in (COMPILED, TRAINED):
        call = torch.compile(between, fullgraph=True, backend="aot_eager")
    if use == COMPILED:
        return [call(op, a, b)]
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    call(op, a, b).square().sum().backward()
    return [t.grad if t.grad is not None else torch.zeros_like(t) for t in (a, b)]


def plainly(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """The same in torch's own operators."""
    return a * b + c
