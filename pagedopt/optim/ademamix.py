"""PagedAdEMAMix: AdEMAMix, which torch does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch

from ..rules.ademamix import ademamix
from .optimizer import PagedOptimizer
from .options import Options, documented
from .own import checked


@documented
class PagedAdEMAMix(PagedOptimizer):
    """AdEMAMix (Pagliardini et al. 2024): AdamW with a second mean of gradients, which forgets slowly.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the first mean, of the squares, and of the slow mean: int8 is refused for that one.
        eps: added to the root of the second moment.
        alpha: weight of the slow mean.
        alpha_warmup, beta3_warmup: steps in which they grow to their values; None or 0: they have them at once.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = ademamix

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: Sequence[float | torch.Tensor] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        alpha: float = 2.0,
        alpha_warmup: int | None = None,
        beta3_warmup: int | None = None,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if beta3_warmup and not min(betas[0], betas[2]) > 0:
            raise ValueError(
                f"betas={betas} with beta3_warmup={beta3_warmup}: the third grows from the first, both above 0"
            )
