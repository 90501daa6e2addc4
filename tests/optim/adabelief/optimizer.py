"""PagedAdaBelief: AdaBelief, which torch does not have."""

from __future__ import annotations

from ..rules.adabelief import adabelief
from .optimizer import PagedOptimizer
from .options import documented
from .own import constructor


@documented
class PagedAdaBelief(PagedOptimizer):
    """AdaBelief (Zhuang et al. 2020): Adam whose second state is the variance of gradients.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the mean and of the variance.
        eps: added to the variance in each step, and to its root.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient.
        capturable: read hyperparameters on the device, so that :meth:`step` may be captured into a CUDA graph.
        options: see below.

    Raises:
        ValueError: a hyperparameter is out of range or has more than one element; an option has a bad value.
        TypeError: there is no such option.
    """

    rule = adabelief

    __init__ = constructor(lr=1e-3, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.0)
