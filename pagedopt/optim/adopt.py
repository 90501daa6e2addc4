"""PagedADOPT: ADOPT, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch

from ..rules.adopt import adopt
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


@documented
class PagedADOPT(PagedOptimizer):
    """ADOPT (Taniguchi et al. 2024): Adam whose gradient is divided by the root of earlier squares, and clipped.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the mean and of the squares.
        eps: the least divisor.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = adopt

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float | torch.Tensor] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        pass
