"""PagedSignum: the Signum optimizer, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from ..rules.signum import signum
from .optimizer import PagedOptimizer
from .options import Options, check_hyperparameters, documented


@documented
class PagedSignum(PagedOptimizer):
    """Signum, whose state is one momentum per parameter.

    Args:
        params: parameters or groups.
        lr: learning rate, the size of every element's update.
        momentum: decay rate of the momentum.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = signum
    has_step = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        check_hyperparameters(**numbers)
        for name, value in numbers.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(f"{name} is a tensor of {value.numel()} elements; a hyperparameter has one")
        if not (lr >= 0 and weight_decay >= 0 and 0 <= momentum < 1):
            raise ValueError(f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}: one is out of range")
        super().__init__(params, {**numbers, "maximize": maximize}, **options)
