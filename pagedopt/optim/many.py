"""A warning of many optimizers of one parameter each."""

from __future__ import annotations

import weakref

from ..system.warn import warn_once
from .rule_optimizer import RuleOptimizer

#: So many live optimizers of one parameter are an optimizer per parameter of a model.
MANY = 100
_of_one_parameter: weakref.WeakSet[RuleOptimizer] = weakref.WeakSet()


def warn_of_many(optimizer: RuleOptimizer) -> None:
    """Note that an optimizer has a new group.  Warn, once in a process, when :data:`MANY` have one parameter each."""
    if sum(len(group["params"]) for group in optimizer.param_groups) != 1:
        _of_one_parameter.discard(optimizer)
        return
    _of_one_parameter.add(optimizer)
    if len(_of_one_parameter) >= MANY:
        warn_once(
            "an optimizer per parameter",
            f"{MANY} optimizers have one parameter each. One optimizer over all parameters can update each within the "
            "backward, too, with less memory: optimizer.attach(model, overlap='backward'), step() "
            "behind each backward, and no hooks of your own",
        )


__all__ = ["MANY", "warn_of_many"]
