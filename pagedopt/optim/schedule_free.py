"""PagedScheduleFreeAdamW: AdamW without a schedule, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Unpack

import torch

from ..rules.schedule_free import schedule_free_adamw, to_average, to_gradients
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


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

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 2.5e-3,
        betas: Sequence[float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if not betas[0] > 0:
            raise ValueError(f"betas={betas}: the first is above 0, or eval() cannot find the average again")

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
