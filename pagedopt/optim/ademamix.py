"""PagedAdEMAMix: AdEMAMix, which torch does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rules.ademamix import ademamix
from .optimizer import PagedOptimizer
from .options import documented
from .own import constructor


def _check_warmup(hyper: Mapping[str, Any]) -> None:
    if hyper["beta3_warmup"] and not min(hyper["betas"][0], hyper["betas"][2]) > 0:
        raise ValueError(
            f"betas={hyper['betas']} with beta3_warmup={hyper['beta3_warmup']}: the third grows from the first, both "
            "above 0"
        )


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

    __init__ = constructor(
        _check_warmup, lr=1e-3, betas=(0.9, 0.999, 0.9999), eps=1e-8, weight_decay=0.0, alpha=2.0, alpha_warmup=None,
        beta3_warmup=None,
    )  # fmt: skip
