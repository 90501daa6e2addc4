"""PagedCautiousLion: Lion that leaves out what goes against the gradient, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch

from ..rules.cautious import cautious_lion
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


@documented
class PagedCautiousLion(PagedOptimizer):
    """Cautious Lion (Liang et al. 2024), without the division by the mean of its mask.

    Args:
        params: parameters or groups.
        lr, betas: as of :class:`PagedLion`.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = cautious_lion
    has_step = False

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: Sequence[float | torch.Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        pass
