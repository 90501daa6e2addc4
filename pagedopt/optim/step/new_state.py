"""The first state of parameters: its memory and its first values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...formats.choice import Choice
from ...formats.floating import chosen_format
from ...system.warn import warn_once
from ...tables.shards import local
from ...transports.choose import DEFAULT
from ..state.encoding import fill
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import NumberSpec, new_numbers
from .members import Member, state_tensors


def create(optimizer: RuleOptimizer, found: Sequence[Member]) -> None:
    """Add missing state to the entries of members; all members of one parameter get the same entry.

    The optimizer does not change: new state belongs to the members.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no room.
        ValueError: a decay is too slow for the format of the state.
    """
    optimizer.store.forget_and_warn(state_tensors(optimizer), type(optimizer).__name__)
    entries: dict[int, dict[str, Any]] = {}
    firsts = []
    for member in found:
        member.entry = entries.setdefault(id(member.param), member.entry)
        if member.turn == 0 and (member.is_new or member.missing):
            firsts.append(member)
            group = optimizer.param_groups[member.group]
            optimizer.check_decays(member.param, group)
            # A parameter was cast, or a format changed, since the constructor has refused squares in float16.
            optimizer.check_squares(member.rule.inputs[2:], member.param, group, refuse=False)
    if not firsts:
        return
    ready = {id(m): _preallocated(optimizer, m) for m in firsts}
    late = [(m, n) for m in firsts for n in m.missing if n not in ready[id(m)]]
    wanted = [m.columns[n].wanted(m.param, n, m.like) for m, n in late if n in m.columns]
    created = optimizer.store.create(wanted) if wanted else []
    _warn_on_cpu(optimizer, firsts)
    _warn_without_int8(optimizer, firsts)
    if wanted:
        from .budget_advice import tell_made  # here: it imports planning, which a step without new state does not need

        tell_made(optimizer, created)
    groups = optimizer.param_groups
    specs = [NumberSpec.of(groups[m.group], m.param) for m, n in late if n not in m.columns]
    made, numbers = iter(created), iter(new_numbers(specs))
    for member in firsts:
        mine = ready[id(member)]
        for name in member.missing:
            value = mine[name] if name in mine else next(made if name in member.columns else numbers)
            member.entry[name] = value
        if optimizer.initial and not mine:
            _fill(optimizer, member)


def _preallocated(optimizer: RuleOptimizer, member: Member) -> dict[str, Any]:
    """Return a member's missing state, made by ``preallocate=True``; {} if it does not fit now."""
    made = optimizer.preallocated.get(member.param)
    if made is None or any(name not in made for name in member.missing):
        return {}
    spec = NumberSpec.of(optimizer.param_groups[member.group], member.param)
    for name in member.missing:
        column, value = member.columns.get(name), made[name]
        if column is None:
            fits = (value.device, value.dtype) == spec
        else:
            fits = column.fits(value, member.param) and value.dtype is column.column.dtype
        if not fits:
            return {}
    return {name: made[name] for name in member.missing}


def _warn_on_cpu(optimizer: RuleOptimizer, members: Sequence[Member]) -> None:
    """Warn, once, of options that have an effect beside a GPU only."""
    if any(member.param.device.type == "cpu" for member in members):
        store, transport = optimizer.store, optimizer.transport
        given = {"host_access": (store.host_access, None), "blocks": (optimizer.blocks, None)}
        for name, (value, default) in {**given, "transport": (transport, DEFAULT)}.items():
            if value != default:
                said = value.__name__ if isinstance(value, type) else repr(value)
                text = f"{name}={said} on cpu: there is no GPU behind these parameters, and it has no effect"
                warn_once((name, "cpu", value), text)


def _warn_without_int8(optimizer: RuleOptimizer, members: Sequence[Member]) -> None:
    """Warn, once, of options of int8 where no group has it; a format of one's own may draw bits from the seed, too."""
    given = {"seed": optimizer.seed or None, "rounding": optimizer.rounding}
    if set(given.values()) == {None} or any(not of.free for m in members for of in m.columns.values()):
        return
    if any(m.draws for m in members):
        given.pop("seed")
    for group in optimizer.param_groups:
        said = optimizer.state_format_of(group)
        if any(isinstance(chosen_format(said, name), Choice) for name in optimizer.state_names(group)):
            return
    for name, value in given.items():
        if value is not None:
            warn_once((name, value), f"{name}={value!r}: no state_format is 'int8', and it has no effect")


def _fill(optimizer: RuleOptimizer, member: Member) -> None:
    """Give new state, which is zero, its first value."""
    for name, value in optimizer.initial.items():
        value = optimizer.param_groups[member.group][value] if isinstance(value, str) else value
        if value == 0:
            continue
        if name in member.missing and (name not in member.columns or member.columns[name].free):
            local(member.entry[name]).fill_(value)
            optimizer.store.drop()  # filling loads pages that are away into memory: give them back before the next fill
        elif keys := [key for key, of in member.columns.items() if of.name == name and key in member.missing]:
            form = member.columns[keys[0]].form
            fill(form, [member.entry[key] for key in keys], member.param, value, optimizer.store)
