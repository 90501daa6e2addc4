"""PagedSignum: the Signum optimizer, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from ..rules.signum import signum
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


@documented
class PagedSignum(PagedOptimizer):
    """Signum (Bernstein et al. 2018): the sign of a momentum, which is the only state.

    Args:
        params: parameters or groups.
        lr: learning rate, the size of every element's update.
        momentum: decay rate of the momentum.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = signum
    has_step = False

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        pass
