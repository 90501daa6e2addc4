"""PagedAdagrad, a drop-in replacement for ``torch.optim.Adagrad``."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..rules.adagrad import adagrad
from .as_torch import AsTorch, constructor
from .options import documented


@documented
class PagedAdagrad(AsTorch, torch.optim.Adagrad):
    """Adagrad (Duchi et al. 2011) with the arguments, defaults, errors and state dict of ``torch.optim.Adagrad``.

    Args:
        params: parameters or groups.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.
        foreach, fused: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below; int8 is refused for ``sum``.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (adagrad,)
    initial: ClassVar = {"sum": "initial_accumulator_value"}

    __init__ = constructor(torch.optim.Adagrad, makes_state=True)
