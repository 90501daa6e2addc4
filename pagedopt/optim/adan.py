"""PagedAdan: Adan, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch

from ..rules.adan import adan
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


@documented
class PagedAdan(PagedOptimizer):
    """Adan (Xie et al. 2022): Nesterov's momentum by the differences of gradients.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the means of gradients, of their differences, and of squares.
        eps: added to the root of the squares' mean.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = adan

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float | torch.Tensor] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        pass
