"""State before the first step: made for every parameter of a group that may get a gradient."""

from __future__ import annotations

from ...formats.floating import known, real_dtype
from ...rules.rule import check_rule
from ...system.look.build import compiled_look
from ...tables.shards import local
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import number_names
from ..state.state_columns import state_columns
from .class_checks import check_update
from .factor import factor_of
from .launches import on_device
from .members import Member, Members
from .plan import Plan


def preallocate(optimizer: RuleOptimizer, index: int) -> None:
    """Make the state of group ``index``, the ring that its pages pass through, and its kernels.

    ``optimizer.state`` gets it in the first step in which a parameter has a gradient, as without.  Parameters that
    require no gradient now, or have state, get none.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no room; nothing has been made.
        CompileError: a kernel cannot be compiled.
    """
    group = optimizer.param_groups[index]
    rule = optimizer.rule_of(group)
    check_rule(rule)
    check_update(rule)
    names = number_names(optimizer, rule)
    found = []
    for i, p in enumerate(group["params"]):
        made = p in optimizer.preallocated or optimizer.state.get(p)
        if p.requires_grad and known(real_dtype(p.dtype)) and not made:
            columns = state_columns(optimizer, rule.inputs[2:], p, group)
            form, missing = optimizer.form_of(p), [*names, *columns]
            found.append(Member(p, index, rule, {}, columns, i, local(p), is_new=True, missing=missing, form=form))
    if not found:
        return
    everyone = Members(found, [], (), (), ())
    plan = Plan.of(optimizer, everyone, on_device(optimizer), factor=factor_of(optimizer))
    for bucket, members in plan.launches:
        bucket.compile(members[0].formats)
    if plan.factor is not None:
        plan.factor.prepare(optimizer)
    store = optimizer.store
    for device in {m.param.device for m in found if m.param.is_cuda}:
        if any(arena.way(store.host_access) == "staged" for arena in store.on(device)):
            store.ring(device)
    compiled_look()  # loads it now, if it has been compiled
    optimizer.preallocated.update((m.param, m.entry) for m in found)
    optimizer.warm = True
