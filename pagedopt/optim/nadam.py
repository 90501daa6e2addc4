"""PagedNAdam, a drop-in replacement for ``torch.optim.NAdam``."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..rules.nadam import nadam
from .as_torch import AsTorch, constructor
from .options import documented


@documented
class PagedNAdam(AsTorch, torch.optim.NAdam):
    """NAdam (Dozat 2016) with the arguments, defaults, errors and state dict of ``torch.optim.NAdam``.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize: as in torch.
        foreach, capturable: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (nadam,)
    initial: ClassVar = {"mu_product": 1.0}
    fixed_dtypes = ("exp_avg",)  # torch updates it with lerp_, which refuses mixed dtypes

    __init__ = constructor(torch.optim.NAdam)
