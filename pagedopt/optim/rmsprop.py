"""PagedRMSprop, a drop-in replacement for ``torch.optim.RMSprop``."""

from __future__ import annotations

import torch

from ..rules.rmsprop import rmsprop, rmsprop_centered, rmsprop_centered_momentum, rmsprop_momentum
from ..rules.rule import Rule
from .as_torch import check_flags, constructor
from .optimizer import Group, PagedOptimizer
from .options import documented
from .rule_optimizer import of_items_alone


@documented
class PagedRMSprop(PagedOptimizer, torch.optim.RMSprop):
    """RMSprop (Tieleman & Hinton 2012) with the arguments, errors and state dict of ``torch.optim.RMSprop``.

    Args:
        params: parameters or groups.
        lr, alpha, eps, weight_decay, momentum, centered, maximize: as in torch.
        foreach, capturable: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below; int8 is refused with ``centered``.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (rmsprop, rmsprop_momentum, rmsprop_centered, rmsprop_centered_momentum)
    extra_defaults = ("centered",)  # it chooses the rule
    fixed_dtypes = ("grad_avg",)  # torch updates it with lerp_, which refuses mixed dtypes

    __init__ = constructor(torch.optim.RMSprop)

    @of_items_alone
    def rule_of(self, group: Group) -> Rule:
        """Return the rule with momentum, if the group's is above 0, and of the variance, if it is ``centered``."""
        check_flags(self, group)
        if group["centered"]:
            return rmsprop_centered_momentum if group["momentum"] > 0 else rmsprop_centered
        return rmsprop_momentum if group["momentum"] > 0 else rmsprop
