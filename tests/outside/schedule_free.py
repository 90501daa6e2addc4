"""An optimizer that trains one point and evaluates another: weights in its state, and a second rule over both."""

from __future__ import annotations

from typing import Any, ClassVar

from pagedopt import Moment, PagedOptimizer, rule


@rule(moments={"z": Moment(weights=True)})
def schedule_free(param, grad, z, *, lr, beta, warmup=float("nan"), step, weight_sum):  # type: ignore[no-untyped-def]
    """Defazio et al. 2024, arXiv:2405.15682, over SGD: ``param`` is y, where gradients are taken."""
    rate = lr * min(1, step / warmup) if warmup == warmup else lr  # a default of NaN may be None in a group
    weight_sum = weight_sum + rate**2
    share = rate**2 / weight_sum
    z = param if step == 1 else z  # its first value
    param = param + share * (z - param) - rate * (1 - beta * (1 - share)) * grad
    z = z - rate * grad
    return param, z, weight_sum


@rule
def to_average(param, z, *, beta):  # type: ignore[no-untyped-def]
    """From y to x, the average."""
    param = param + (1 - 1 / beta) * (z - param)
    return param


@rule
def to_gradients(param, z, *, beta):  # type: ignore[no-untyped-def]
    """From x back to y."""
    param = param + (1 - beta) * (z - param)
    return param


class ScheduleFree(PagedOptimizer):
    rule = schedule_free
    initial: ClassVar = {"weight_sum": 0.0}
    extra_defaults = ("training",)

    def __init__(self, params: Any, lr=1.0, beta=0.9, warmup: int | None = None, **options: Any) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup, "training": True}, **options)

    def switch(self, training: bool) -> None:
        """Let parameters be where gradients are taken, or the average: to evaluate, or to save the model."""
        for group in self.param_groups:
            if group["training"] is not training:
                self.apply(to_gradients if training else to_average, group)
                group["training"] = training
