"""Keys of defaults and parameter groups: defaults that nothing reads are refused, and groups may have any."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..common.similar_names import one_edit_apart
from ..rules import UPDATES
from ..system.warn import warn_once
from .options import OF_GROUPS, TABLE, Options
from .state.group_scalars import group_keys
from .state.rule_optimizer import RuleOptimizer
from .step.class_checks import nearest_of

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
