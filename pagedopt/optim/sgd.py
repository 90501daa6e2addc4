"""SGD, as a drop-in for ``torch.optim.SGD``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from ..rules.rule import Rule
from ..rules.sgd import sgd, sgd_momentum
from .base import Group, PagedOptimizer
from .options import Options


class PagedSGD(PagedOptimizer, torch.optim.SGD):
    """SGD with momentum (Sutskever et al. 2013), with the arguments, errors and state dict of ``torch.optim.SGD``.

    Args:
        params: parameters or groups.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        foreach, fused: which of its implementations torch would choose; this class has one, so they change nothing but
            what is refused, as torch refuses it.
        differentiable: must be False.
        options: see :class:`Options`.

    Raises:
        ValueError, RuntimeError: as torch for its arguments; ``differentiable`` is True; an option is unknown.
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
        if differentiable and not fused:  # torch has an error of its own for both
            raise ValueError("differentiable=True: PagedSGD does not support it; use torch.optim.SGD for that")
        self._configure(options)
        torch.optim.SGD.__init__(
            self, params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self._step_supports_amp_scaling = False  # torch's fused step takes the scale of a GradScaler; this one does not

    def rule_of(self, group: Group) -> Rule:
        """With momentum, or without any state."""
        return sgd if group["momentum"] == 0 else sgd_momentum
