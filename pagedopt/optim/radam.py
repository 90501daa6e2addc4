"""PagedRAdam, a drop-in replacement for ``torch.optim.RAdam``."""

from __future__ import annotations

import torch

from ..rules.radam import radam
from .as_torch import AsTorch, constructor
from .options import documented


@documented
class PagedRAdam(AsTorch, torch.optim.RAdam):
    """RAdam (Liu et al. 2020) with the arguments, defaults, errors and state dict of ``torch.optim.RAdam``.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: as in torch.
        foreach, capturable: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (radam,)
    fixed_dtypes = ("exp_avg",)  # torch updates it with lerp_, which refuses mixed dtypes

    __init__ = constructor(torch.optim.RAdam)
