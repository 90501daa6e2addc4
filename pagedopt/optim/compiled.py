"""A step in a function that ``torch.compile`` traces: one operator in its graph.

These functions run only while Dynamo traces ``step()``.  The operator is in :mod:`.registered_step`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..system.internals import changed_while_traced, traced_as_constant
from ..tables.shards import is_base_class
from .state.rule_optimizer import occurrences


@traced_as_constant
def _show_groups(self: Any) -> bool:
    """Let Dynamo see today's groups, and return whether the operator can take their parameters and gradients.

    If Dynamo reads ``param_groups`` of an optimizer, it guards on every hyperparameter, and sets ``capturable`` in
    groups on a GPU that have no state yet.  So it is given the same list under the name ``_shown_groups``.
    """
    if any(map(changed_while_traced, (self.param_groups, *self.param_groups))):
        return False
    self._shown_groups = self.param_groups
    params = [p for _, _, p in occurrences(self)]
    grads = [p.grad for p in params if p.grad is not None]
    supported = all(is_base_class(t) and t.layout is torch.strided for t in (*params, *grads))
    # Inductor of torch 2.11 lost updates of parameters that are views of one memory; 2.13 did not.
    memories = [at for p in params if (at := p.untyped_storage().data_ptr())] if supported else []
    return supported and len({*map(id, params)}) == len(params) and len({*memories}) == len(memories)


@traced_as_constant
def _hand_out(self: Any, positions: tuple[int, ...]) -> int:
    """Return the handle of a step of the parameters at these positions."""
    from .registered_step import handle_of

    return handle_of(self, positions)


class Traceable:
    """What an optimizer needs to be traced: two functions that Dynamo calls and does not look into."""

    _show_groups = _show_groups
    _hand_out = _hand_out


def put_into_graph(optimizer: Any) -> bool:
    """Put a step into the graph that Dynamo traces; return False if the step has to run outside of it (a graph break).

    It runs outside where the operator could not be passed all that it reads and writes: for DTensors and other classes
    of tensors, sparse gradients, parameters that share memory or come twice, groups that the traced function itself has
    changed before, and after :meth:`~PagedOptimizer.attach`.
    """
    if optimizer._overlap is not None or not optimizer._show_groups():
        return False
    params, grads, positions, position = [], [], [], 0
    for group in optimizer._shown_groups:
        for p in group["params"]:
            if p.grad is not None:
                params.append(p)
                grads.append(p.grad)
                positions.append(position)
            position += 1
    handle = optimizer._hand_out(tuple(positions))
    if params:
        with torch.no_grad():
            torch.ops.pagedopt.step_(params, grads, handle)
    return True


__all__ = ["Traceable", "put_into_graph"]
