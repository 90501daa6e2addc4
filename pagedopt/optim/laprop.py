"""PagedLaProp: LaProp, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch

from ..rules.laprop import laprop
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


@documented
class PagedLaProp(PagedOptimizer):
    """LaProp (Ziyin et al. 2020): a momentum of gradients that are divided by their root mean square.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the momentum and of the squares.
        eps: added to the root of the squares' mean.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = laprop

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 4e-4,
        betas: Sequence[float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-15,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        pass
