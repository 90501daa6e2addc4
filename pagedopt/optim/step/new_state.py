"""The first state of parameters: room for it, and what it begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...tables.shards import local
from ..state.encoding import fill
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import ScalarPlace, new_numbers
from .members import Member, state_tensors


def create(optimizer: RuleOptimizer, found: Sequence[Member]) -> None:
    """Complete the entries of members with first state, one for all places in which a parameter stands.

    Nothing of the optimizer changes: what is made belongs to the members.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no room.
    """
    optimizer.store.mind(state_tensors(optimizer), type(optimizer).__name__)
    entries: dict[int, dict[str, Any]] = {}
    firsts = []
    for member in found:
        member.entry = entries.setdefault(id(member.param), member.entry)
        if member.turn == 0 and (member.is_new or member.missing):
            firsts.append(member)
    wanted = [m.columns[n].wanted(m.param, n) for m in firsts for n in m.missing if n in m.columns]
    created = optimizer.store.create(wanted) if wanted else []
    if wanted:
        from .budget_advice import tell_made  # loads what plans are made with: where state is made, and not before

        tell_made(optimizer, created)
    made = iter(created)
    groups = optimizer.param_groups
    numbers = iter(
        new_numbers([ScalarPlace.of(groups[m.group], m.param) for m in firsts for n in m.missing if n not in m.columns])
    )
    for member in firsts:
        member.entry.update((name, next(made if name in member.columns else numbers)) for name in member.missing)
    if optimizer.initial:
        _fill(optimizer, firsts)


def _fill(optimizer: RuleOptimizer, firsts: list[Member]) -> None:
    """Give new state, which is zero, its first value."""
    for member in firsts:
        for name, value in optimizer.initial.items():
            value = optimizer.param_groups[member.group][value] if isinstance(value, str) else value
            if value == 0:
                continue
            if name in member.missing and (name not in member.columns or member.columns[name].free):
                local(member.entry[name]).fill_(value)
                optimizer.store.drop()  # keeps to the budget while pages are touched that should not stay in memory
            elif columns := {
                key: of for key, of in member.columns.items() if of.name == name and key in member.missing
            }:
                form = next(iter(columns.values())).form
                fill(form, [member.entry[key] for key in columns], member.param, value, optimizer.store)
