"""SGD, as a drop-in for ``torch.optim.SGD``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..formats.floating import StateFormat
from ..paging.policy import Budget
from ..rules.rule import Rule
from ..rules.sgd import sgd, sgd_momentum
from .base import Group, PagedOptimizer


class PagedSGD(PagedOptimizer, torch.optim.SGD):
    """SGD with momentum (Sutskever et al. 2013), with the arguments, errors and state dict of ``torch.optim.SGD``.

    Args:
        params: parameters or groups.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        state_format, placement, device_budget, host_access, blocks, transport: see :class:`PagedOptimizer`.

    Raises:
        ValueError: as torch for its arguments; an option is unknown.
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
        state_format: StateFormat = None,
        placement: str | None = None,
        device_budget: Budget = None,
        host_access: str | None = None,
        blocks: int | None = None,
        transport: str = "managed",
    ) -> None:
        self._configure(state_format, placement, device_budget, host_access, blocks, transport)
        torch.optim.SGD.__init__(
            self, params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize,
        )  # fmt: skip

    def rule_of(self, group: Group) -> Rule:
        """With momentum, or without any state."""
        return sgd_momentum if group["momentum"] else sgd
