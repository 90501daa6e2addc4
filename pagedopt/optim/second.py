"""A second rule over parameters and their state, beside that of steps."""

from __future__ import annotations

import torch

from ..launch.apply import multi_tensor_apply
from ..rules.rule import Rule, check_rule
from ..tables.tensors import local
from . import masters
from .rule_optimizer import Group, RuleOptimizer, check_whole
from .scalars import scalars_of


@torch.no_grad()
def apply(optimizer: RuleOptimizer, rule: Rule, group: Group) -> None:
    """Apply a rule to those parameters of a group that have state; see :meth:`PagedOptimizer.apply`."""
    check_rule(rule)
    check_whole(optimizer)
    masters.look_for_writes(optimizer)
    by_kind: dict[object, list[tuple[torch.Tensor, ...]]] = {}
    exact: dict[torch.Tensor, torch.Tensor] = {}  # of parameters that have lost something
    for p in dict.fromkeys(group["params"]):
        if not (entry := optimizer.state.get(p)):
            continue
        if absent := [name for name in rule.inputs[1:] if name not in entry]:
            raise ValueError(
                f"rule {rule.name!r} takes {', '.join(map(repr, absent))}; the state of a parameter of shape "
                f"{tuple(p.shape)} is {', '.join(map(repr, entry))}"
            )
        if masters.lost_of(optimizer, p) is not None:
            exact[p] = masters.exact_of(optimizer, p, p.device)
        row = [local(t) for t in (exact.get(p, p), *(entry[name] for name in rule.inputs[1:]))]
        row = [torch.view_as_real(t) if t.is_complex() else t for t in row]
        by_kind.setdefault((p.device, *(t.dtype for t in row)), []).append(tuple(row))
    scalars = scalars_of(rule, group, needed=set(rule.scalars) - set(rule.defaults))
    for rows in by_kind.values():
        multi_tensor_apply(rule, list(zip(*rows, strict=True)), scalars)
    for p, values in exact.items():
        masters.put(optimizer, p, local(values), bool)
    optimizer.versions = None
    optimizer.store.drop()
