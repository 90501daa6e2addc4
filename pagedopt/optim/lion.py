"""PagedLion: the Lion optimizer, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch

from ..rules.lion import lion
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


@documented
class PagedLion(PagedOptimizer):
    """Lion (Chen et al. 2023), whose state is one momentum per parameter.

    Args:
        params: parameters or groups.
        lr: learning rate, the size of every element's update; 3 to 10 times less than for AdamW.
        betas: weight of the momentum in the update's interpolation, and decay rate of the momentum: a sequence of two
            numbers or tensors; groups have them as a tuple.
        weight_decay: decoupled weight decay; 3 to 10 times more than for AdamW.
        maximize: go up the gradient.
        capturable: read learning rate and betas on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = lion
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
