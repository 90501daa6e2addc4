"""PagedAdadelta, a drop-in replacement for ``torch.optim.Adadelta``."""

from __future__ import annotations

import torch

from ..rules.adadelta import adadelta
from .as_torch import AsTorch, constructor
from .options import documented


@documented
class PagedAdadelta(AsTorch, torch.optim.Adadelta):
    """Adadelta (Zeiler 2012) with the arguments, defaults, errors and state dict of ``torch.optim.Adadelta``.

    Args:
        params: parameters or groups.
        lr, rho, eps, weight_decay, maximize: as in torch.
        foreach, capturable: see :class:`PagedAdamW`.
        differentiable: must be False.
        options: see below.

    Raises:
        ValueError, RuntimeError: torch refuses an argument; ``differentiable`` is True; an option has a bad value.
        TypeError: there is no such option.
    """

    rules = (adadelta,)

    __init__ = constructor(torch.optim.Adadelta)
