"""PagedSGD, a drop-in replacement for ``torch.optim.SGD``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from ..rules.rule import Rule
from ..rules.sgd import sgd, sgd_momentum
from .optimizer import Group, PagedOptimizer
from .options import Options, check_hyperparameters, documented
from .rule_optimizer import of_items_alone


@documented
class PagedSGD(PagedOptimizer, torch.optim.SGD):
    """SGD with momentum (Sutskever et al. 2013), with the arguments, errors and state dict of ``torch.optim.SGD``.

    Args:
        params: parameters or groups.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        foreach, fused: choose torch's implementation; this class has only one, so they only decide, as in torch, which
            inputs are refused, and what a ``GradScaler`` leaves to the step: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    has_step = False
    rules = (sgd, sgd_momentum)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        if differentiable and not fused:  # torch itself refuses both together
            raise ValueError("differentiable=True: PagedSGD does not support it; use torch.optim.SGD for that")
        check_hyperparameters(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        self._configure(options)
        torch.optim.SGD.__init__(
            self, params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip

    @of_items_alone
    def rule_of(self, group: Group) -> Rule:
        """Return the rule with momentum, or the one without state if the group's momentum is 0."""
        return sgd if group["momentum"] == 0 else sgd_momentum
