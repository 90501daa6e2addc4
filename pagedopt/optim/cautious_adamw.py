"""PagedCautiousAdamW: AdamW that leaves out what goes against the gradient, which torch does not have."""

from __future__ import annotations

from ..rules.cautious import cautious_adamw
from .optimizer import PagedOptimizer
from .options import documented
from .own import constructor


@documented
class PagedCautiousAdamW(PagedOptimizer):
    """Cautious AdamW (Liang et al. 2024), without the division by the mean of its mask.

    Args:
        params: parameters or groups.
        lr, betas, eps: as of :class:`PagedAdamW`.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = cautious_adamw

    __init__ = constructor(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
