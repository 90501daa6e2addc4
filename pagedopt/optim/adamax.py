"""PagedAdamax, a drop-in replacement for ``torch.optim.Adamax``."""

from __future__ import annotations

import torch

from ..rules.adamax import adamax
from .as_torch import AsTorch, constructor
from .options import documented


@documented
class PagedAdamax(AsTorch, torch.optim.Adamax):
    """Adamax (Kingma & Ba 2015) with the arguments, defaults, errors and state dict of ``torch.optim.Adamax``.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay, maximize: as in torch.
        foreach, capturable: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below; int8 is refused for ``exp_inf``.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (adamax,)
    fixed_dtypes = ("exp_avg",)  # torch updates it with lerp_, which refuses mixed dtypes

    __init__ = constructor(torch.optim.Adamax)
