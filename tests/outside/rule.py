"""An optimizer of one's own, whose state starts at one, with a number for each parameter beside its step."""

from __future__ import annotations

from typing import Any, ClassVar

from pagedopt import PagedOptimizer, rule
from pagedopt.rules import sqrt


@rule
def tempered(param, grad, scale, *, lr, decay, eps, step, start):
    """A root of mean squares that starts at one; ``start`` is how much of that one is still in it."""
    rate = decay * (1 - 0.5**step)
    start = start * rate
    scale = rate * scale + (1 - rate) * grad * grad
    param = param - lr * (1 - start) * grad / (sqrt(scale) + eps)
    return param, scale, start


class Tempered(PagedOptimizer):
    rule = tempered
    initial: ClassVar = {"scale": 1.0, "start": 1.0}

    def __init__(self, params: Any, lr: float = 1e-3, decay: float = 0.9, eps: float = 1e-8, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps}, **options)
