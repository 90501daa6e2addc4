"""PagedScheduleFreeAdamW: AdamW without a schedule, which torch does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..rules.schedule_free import schedule_free_adamw, to_average, to_gradients
from .optimizer import PagedOptimizer
from .options import documented
from .own import constructor


def _check_first_beta(hyper: Mapping[str, Any]) -> None:
    if not hyper["betas"][0] > 0:
        raise ValueError(f"betas={hyper['betas']}: the first is above 0, or eval() cannot find the average again")


@documented
class PagedScheduleFreeAdamW(PagedOptimizer):
    """Schedule-Free AdamW (Defazio et al. 2024): call :meth:`eval` to evaluate or save, and :meth:`train` behind it.

    Args:
        params: parameters or groups.
        lr: learning rate, which no schedule lowers.
        betas: weight of the average where gradients are taken, which is above 0, and decay rate of the squares.
        eps: added to the root of the squares' mean.
        weight_decay: decay of the point where gradients are taken.
        warmup_steps: steps in which the learning rate grows.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = schedule_free_adamw
    initial: ClassVar = {"weight_sum": 0.0}

    __init__ = constructor(_check_first_beta, lr=2.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup_steps=0)

    def check_may_step(self) -> None:
        """Raise RuntimeError if no step may begin, as after :meth:`eval`."""
        super().check_may_step()
        if any(group.get("averaged") for group in self.param_groups):
            raise RuntimeError("parameters are the average, for evaluation; call optimizer.train() before a step")

    def eval(self) -> None:
        """Let parameters be the average of the weights, to evaluate the model or to save it."""
        for group in self.param_groups:
            if not group.get("averaged"):
                self.apply(to_average, group)
                group["averaged"] = True

    def train(self) -> None:
        """Let parameters be where gradients are taken."""
        for group in self.param_groups:
            if group.pop("averaged", False):
                self.apply(to_gradients, group)
