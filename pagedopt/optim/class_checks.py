"""Checks of an optimizer class and its groups before the first step: rules, hyperparameters, first values, keys."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any

from ..common.names import nearest, one_edit_apart
from ..rules import UPDATES, Rule, RuleError
from ..rules.rule import check_rule
from ..system.warn import warn_once
from .options import OF_GROUPS, TABLE, Options
from .rule_optimizer import Group, RuleOptimizer
from .scalars import group_keys, number_of, scalars_of

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


#: Keys by which torch chooses among its implementations.
FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
#: What some optimizer of this package reads: hyperparameters, and the flag that chooses among rules of PagedAdamW.
READ_BY_SOME = frozenset({"amsgrad"}.union(*map(group_keys, UPDATES.values())))


def keys_read(optimizer: RuleOptimizer) -> set[str]:
    """Return the keys of groups that an optimizer reads; if only a step knows its rules, all that they may read."""
    rules = optimizer.known_rules()
    named = {key for key in optimizer.initial.values() if isinstance(key, str)}
    found = named.union(optimizer.extra_defaults, *map(group_keys, rules))
    return found if rules else found | {*READ_BY_SOME, *optimizer.defaults}


def check_defaults(owner: str, defaults: Mapping[str, Any], read: Collection[str], options: Options) -> None:
    """Check the defaults that a class gives to ``super().__init__()``.

    Args:
        read: keys that the class's rules read, and those that it names in ``initial`` and ``extra_defaults``.
        options: those of the constructor.

    Raises:
        TypeError: nothing reads one of them.
        ValueError: one is an option that holds for all parameters, with another value than in ``options``.
    """
    if unread := [name for name in defaults if name not in {*read, *FLAGS, *TABLE}]:
        names, there = ", ".join(map(repr, unread)), ", ".join(sorted(read)) or "nothing"
        near = "".join(nearest_of(name, {*read, *FLAGS, *TABLE}) for name in unread)
        raise TypeError(
            f"{owner} has {names} among its defaults, which nothing reads; its rules read {there}{near}. Leave it "
            f"out, or let a rule take it; if other code reads it, write extra_defaults = {(*unread,)} in the class"
        )
    if name := _other_option(defaults, read, options):
        raise ValueError(f"{owner} has the option {name!r} among its defaults; write super().__init__(…, {name}=…)")


def check_group_keys(owner: str, group: Mapping[str, Any], read: Collection[str], options: Options) -> None:
    """Check the keys of a new group of the class ``owner``, which reads the keys ``read``.

    A wrapper may repeat the ``options`` of the constructor in each group, as ``ZeroRedundancyOptimizer`` does.

    Raises:
        KeyError: it has no parameters.
        ValueError: it has another value of an option that holds for all parameters of an optimizer.
    """
    if "params" not in group:
        keys = ", ".join(map(repr, group)) or "nothing"
        raise KeyError(f"a parameter group has no 'params', and has {keys}; write {{'params': …}}")
    if name := _other_option(group, read, options):
        raise ValueError(f"a parameter group has {name!r}, which holds for all parameters; write {owner}(…, {name}=…)")


def _other_option(keys: Mapping[str, Any], read: Collection[str], options: Options) -> str:
    """Return the first option in ``keys`` that holds for all parameters and has another value there, or ""."""
    for name in TABLE:
        if name in OF_GROUPS or name in read or name not in keys:
            continue
        own: Any = options[name]  # type: ignore[literal-required]
        if keys[name] is not own and (type(keys[name]) is not type(own) or keys[name] != own):
            return name
    return ""


def warn_of_unread(owner: str, group: Mapping[str, Any], read: Collection[str]) -> None:
    """Warn of keys of a group that look as if they should be read: once in a process for each class and key.

    A key does so if it is a hyperparameter of other optimizers, unless its value is 0, False or None, and if one letter
    is wrong in it.  All other keys are the user's own, as in torch.
    """
    known = {"params", *read, *FLAGS, *TABLE}
    for name, value in group.items():
        if name in known or not isinstance(name, str):
            continue
        if name in READ_BY_SOME:
            doubt = "" if _is_off(value) else f"a hyperparameter that {owner} does not have"
        else:
            doubt = _misspelt(name, known)
        if doubt:
            warn_once((owner, name), f"{owner}: a parameter group has {name!r}, {doubt}")


def _misspelt(name: str, known: Collection[str]) -> str:
    meant = [key for key in sorted(known) if one_edit_apart(name, key)]
    if not meant or min(len(name), len(meant[0])) == 1:  # every letter is one edit from every other
        return ""
    return f"which nothing reads; did you mean {meant[0]!r}?"


def _is_off(value: Any) -> bool:
    """Return whether a value is None, False, or a number or tensor that is 0."""
    try:
        return value is None or bool(value == 0)
    except (RuntimeError, ValueError):  # several elements
        return False


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
            "after each backward, and no hooks of your own",
        )
