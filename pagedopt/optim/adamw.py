"""PagedAdamW, a drop-in replacement for ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch

from ..rules.adam import adam, adam_amsgrad
from ..rules.adamw import adamw, adamw_amsgrad
from ..rules.rule import Rule
from ..system.warn import warn_once
from .as_torch import check_flags
from .optimizer import Group, PagedOptimizer
from .options import Options, check_hyperparameters, documented
from .rule_optimizer import of_items_alone
from .scalars import tuple_of_betas


@documented
class PagedAdamW(PagedOptimizer, torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) with the arguments, defaults, errors and state dict of ``torch.optim.AdamW``.

    One launch updates all parameters that share one combination of dtypes.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor of one element (a step waits for a CUDA tensor, unless ``fused`` or
            ``capturable``).
        betas: decay rates of the two moments, a sequence of two numbers or tensors; groups have them as a tuple.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        amsgrad: use the largest second moment so far.
        maximize: go up the gradient.
        foreach, fused: choose torch's implementation; this class has only one.  They have three effects, all as in
            torch: which inputs are refused; where ``step`` lies (with ``fused`` on the parameter's device, which
            reads it there in each step, with the learning rate and betas); and with ``fused`` a ``GradScaler`` leaves
            it to the step to divide by its scale, and to do nothing where a gradient is infinite or NaN.  Then nothing
            waits for the device.  Unlike in torch gradients stay scaled.
        capturable: store ``step`` on the parameter's device, and read it, the learning rate and betas there: then
            ``torch.cuda.graph`` may capture :meth:`step`.
        differentiable: must be False.
        options: see below.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (adamw, adamw_amsgrad, adam, adam_amsgrad)
    extra_defaults = ("amsgrad", "decoupled_weight_decay")  # they choose the rule
    fixed_dtypes = ("exp_avg",)  # torch updates it with lerp_, which refuses mixed dtypes

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        if differentiable and not fused:  # torch itself refuses both together
            raise ValueError("differentiable=True: PagedAdamW does not support it; use torch.optim.AdamW for that")
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay)
        self._configure(options)
        torch.optim.AdamW.__init__(
            self, params, lr=lr, betas=tuple_of_betas(betas), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            maximize=maximize, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's AdamW, which sets ``decoupled_weight_decay``; says so where that changes what a group does."""
        groups = state.get("param_groups", vars(self).get("param_groups", ()))
        coupled = any(not g.get("decoupled_weight_decay", True) and g.get("weight_decay") for g in groups)
        super().__setstate__(state)
        if coupled:
            warn_once(
                "decoupled_weight_decay",
                "decoupled_weight_decay is False in what is loaded or copied, and True now, as in torch's AdamW; for "
                "Adam's weight decay set it in each of optimizer.param_groups again",
            )

    @of_items_alone  # but for what it refuses if ``capturable``, of which no compiled look knows
    def rule_of(self, group: Group) -> Rule:
        """Return AdamW's rule, or Adam's if ``decoupled_weight_decay`` is False; with ``amsgrad`` its variant.

        Raises:
            AssertionError, RuntimeError: see :func:`check_flags`.
        """
        check_flags(self, group)
        if group.get("decoupled_weight_decay", True):
            return adamw_amsgrad if group["amsgrad"] else adamw
        return adam_amsgrad if group["amsgrad"] else adam
