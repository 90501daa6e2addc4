"""PagedADOPT: ADOPT, which torch does not have."""

from __future__ import annotations

from ..rules.adopt import adopt
from .optimizer import PagedOptimizer
from .options import documented
from .own import constructor


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

    __init__ = constructor(lr=1e-3, betas=(0.9, 0.9999), eps=1e-6, weight_decay=0.0)
