"""Checks of an optimizer class before its first step: rules, hyperparameters, first values of state."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any

from ...common.similar_names import nearest
from ...rules import Rule, RuleError
from ...rules.rule import check_rule
from ..state.rule_optimizer import Group
from .hyperparameters import number_of, scalars_of

_ORDER = "the parameter comes first, then the gradient, then state"


def check_rules(owner: str, rules: Iterable[Any]) -> None:
    """Raise TypeError if a rule of the class ``owner`` is missing or not a rule, RuleError as :func:`check_update`."""
    for rule in rules:
        if rule is None:
            raise TypeError(
                f"{owner} has no rule; write 'rule = …' in the class, a function decorated with pagedopt.rule"
            )
        check_rule(rule)
        check_update(rule)


@functools.cache
def check_update(rule: Rule) -> None:
    """Raise RuleError if a rule leaves its first input, changes its second, or assigns state and does not return it."""
    names, code, changes = rule.inputs, rule.function.__code__, rule.changes
    who = f"{code.co_filename}:{code.co_firstlineno}: rule {rule.name!r} of an optimizer"
    if len(names) < 2:
        raise RuleError(f"{who} takes {names[0]!r} alone: {_ORDER}")
    if 0 not in changes:
        raise RuleError(f"{who} does not return {names[0]!r}, its first input: {_ORDER}")
    if 1 in changes:
        raise RuleError(f"{who} returns {names[1]!r}, its second input, which is the gradient and stays: {_ORDER}")
    if lost := [name for name in names[2:] if name in rule.lost]:
        returned = [name for i, name in enumerate(names) if i in changes or name in lost]
        new = "" if names[0] in rule.assigned else f"'{names[0]} = …' and "
        raise RuleError(
            f"{who} assigns its state {', '.join(map(repr, lost))} and does not return it, so that it would stay "
            f"as it was: write {new}'return {', '.join((*returned, *rule.carried))}', or use another name for a value "
            "that is not kept"
        )


def check_initial(owner: str, initial: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ValueError if ``initial`` names state other than ``names``, TypeError if a value is no number or text."""
    for name, value in initial.items():
        if name not in names:
            raise ValueError(f"{owner}.initial has {name!r}; its state is {sorted(names)}{nearest_of(name, names)}")
        if not isinstance(value, Real | str):
            raise TypeError(
                f"{owner}.initial[{name!r}] is {value!r}; give a number, or the name of the group's value that is one"
            )


def check_group(owner: str, initial: Mapping[str, Any], group: Group) -> None:
    """Raise ValueError if the group lacks a value that ``initial`` names, TypeError if the value is not a number."""
    for name, key in initial.items():
        if isinstance(key, str):
            if key not in group:
                raise ValueError(
                    f"{owner}.initial[{name!r}] is {key!r}, which is neither in the defaults nor in the group"
                    f"{nearest_of(key, group)}"
                )
            number_of(key, group[key])


def check_scalars(owner: str, rule: Rule, group: Group, defaults: Collection[str]) -> None:
    """Check that a group has the hyperparameters of a rule.

    Raises:
        TypeError: a hyperparameter is missing, is not a number, or has the name of an input of the rule.
        ValueError: a tuple has another length than the rule takes.
    """
    for name in defaults:
        if name in rule.inputs:
            raise TypeError(
                f"{owner} has {name!r} among its defaults, and {rule.before_star([name])}: write '*' before it"
            )
    own = {"step", *rule.defaults, *rule.carried, *scalars_of(rule, group)}
    if missing := [name for name in rule.scalars if name not in own]:
        raise TypeError(
            f"{owner}: rule {rule.name!r} takes {', '.join(map(repr, missing))}, neither in the defaults that "
            f"super().__init__() is given nor in the group{''.join(nearest_of(name, group) for name in missing)}"
        )


def nearest_of(name: str, names: Collection[str]) -> str:
    """Return the end of a message that suggests a similar name, or ""."""
    found = nearest(name, (n for n in names if n != "params"), 0.6)  # lower than usual: names are few and short
    return f"; for {name!r} there is {found!r}" if found else ""


__all__ = ["check_group", "check_initial", "check_rules", "check_scalars", "check_update", "nearest_of"]
