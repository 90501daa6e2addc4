"""PagedAdam, a drop-in replacement for ``torch.optim.Adam``."""

from __future__ import annotations

import torch

from ..rules.adam import adam, adam_amsgrad
from ..rules.adamw import adamw, adamw_amsgrad
from ..rules.rule import Rule
from .as_torch import check_flags, constructor
from .optimizer import Group, PagedOptimizer
from .options import documented
from .rule_optimizer import of_items_alone


@documented
class PagedAdam(PagedOptimizer, torch.optim.Adam):
    """Adam (Kingma & Ba 2015) with the arguments, defaults, errors and state dict of ``torch.optim.Adam``.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in torch.
        foreach, fused, capturable: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (adam, adam_amsgrad, adamw, adamw_amsgrad)
    extra_defaults = ("amsgrad", "decoupled_weight_decay")  # they choose the rule
    fixed_dtypes = ("exp_avg",)  # torch updates it with lerp_, which refuses mixed dtypes

    __init__ = constructor(torch.optim.Adam)

    @of_items_alone
    def rule_of(self, group: Group) -> Rule:
        """Return Adam's rule, or AdamW's if ``decoupled_weight_decay`` is set; with ``amsgrad`` its variant."""
        check_flags(self, group)
        if group.get("decoupled_weight_decay", False):
            return adamw_amsgrad if group["amsgrad"] else adamw
        return adam_amsgrad if group["amsgrad"] else adam
