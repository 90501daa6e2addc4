"""PagedLaProp: LaProp, which torch does not have."""

from __future__ import annotations

from ..rules.laprop import laprop
from .optimizer import PagedOptimizer
from .options import documented
from .own import constructor


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

    __init__ = constructor(lr=4e-4, betas=(0.9, 0.999), eps=1e-15, weight_decay=0.0)
