"""AdamW, as a drop-in for ``torch.optim.AdamW``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from ..rules.adam import adam, adam_amsgrad
from ..rules.adamw import adamw, adamw_amsgrad
from ..rules.rule import Rule
from .base import Group, PagedOptimizer
from .options import Options


class PagedAdamW(PagedOptimizer, torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) with arguments, defaults, errors and state dict of ``torch.optim.AdamW``.

    One launch updates every parameter of one combination of dtypes, whatever their number.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor of one element (a CUDA tensor is read every step, which waits for it).
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        amsgrad: use the largest second moment so far.
        maximize: go up the gradient.
        foreach, fused, capturable: which of its implementations torch would choose; this class has one, so they change
            what is refused, as torch refuses it, and nothing else but where ``step`` lies: with ``fused`` or
            ``capturable`` on the parameter's device, as torch has it.  (Capturing a step is refused nevertheless.)
        differentiable: must be False.
        options: see :class:`Options`.

    Raises:
        ValueError, RuntimeError: as torch for its arguments; ``differentiable`` is True; an option is unknown.
    """

    rules = (adamw, adamw_amsgrad, adam, adam_amsgrad)
    fixed_dtypes = ("exp_avg",)  # torch's lerp_
    rounded_on_cuda = ("beta1", "beta2")  # fused_adam_utils.cuh, torch 2.11: 1 - beta is that of beta in float32

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
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
        if differentiable and not fused:  # torch has an error of its own for both
            raise ValueError("differentiable=True: PagedAdamW does not support it; use torch.optim.AdamW for that")
        self._configure(options)
        torch.optim.AdamW.__init__(
            self, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self._step_supports_amp_scaling = False  # torch's fused step takes the scale of a GradScaler; this one does not

    def rule_of(self, group: Group) -> Rule:
        """AdamW or, as torch's group flag has it, Adam, with or without the running maximum."""
        if group["capturable"] or group["differentiable"]:
            _check_flags(group)
        if group.get("decoupled_weight_decay", True):
            return adamw_amsgrad if group["amsgrad"] else adamw
        return adam_amsgrad if group["amsgrad"] else adam


def _check_flags(group: Group) -> None:
    """
    Raises:
        AssertionError: ``capturable`` is set, ``fused`` is not, and a parameter on a CPU has a gradient (as torch).
        RuntimeError: ``differentiable`` is set.
    """
    if group["differentiable"]:
        raise RuntimeError("differentiable=True is set in a group; PagedAdamW does not support it: use torch's AdamW")
    if not group.get("fused") and any(p.device.type == "cpu" and p.grad is not None for p in group["params"]):
        raise AssertionError(
            "capturable=True is set in a group with parameters on a CPU; it is for CUDA parameters, or for fused=True"
        )
