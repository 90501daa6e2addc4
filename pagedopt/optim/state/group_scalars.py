"""A rule's hyperparameters, as parameter groups give them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from ...rules import Rule

Group = dict[str, Any]


def scalars_of(
    rule: Rule, group: Mapping[str, Any], needed: Collection[str] = (), on_device: bool = False
) -> dict[str, Any]:
    """Return the rule's hyperparameters that ``group`` has, by name, as doubles; reads tensors of one element.

    A tuple with a plural name gives its items by number: ``betas`` is ``beta1``, ``beta2``.  A hyperparameter whose
    default is a bool gets the truth value.

    Args:
        needed: names that the group must have.
        on_device: return CUDA tensors as they are, unread.

    Raises:
        KeyError: one of the ``needed`` names is missing (as torch).
        ValueError: a tuple has another length than the rule takes (as torch).
        TypeError: a value is not a number.
    """
    found = {}
    for name, plural, item, length, is_switch in _sources(rule):
        if name in group:
            value = group[name]
        elif plural in group:
            value = group[plural]
            if length and len(value) != length:
                raise ValueError(f"{plural} is {value}; rule {rule.name!r} takes {length} of them")
            value = value[item]
        elif name in needed or plural in needed:
            raise KeyError(name if name in needed else plural)
        else:
            continue
        if type(value) is not float and not (on_device and isinstance(value, torch.Tensor) and value.is_cuda):
            value = (1.0 if value else 0.0) if is_switch else number_of(name, value)
        found[name] = value
    return found


def scalar_of(rule: Rule, name: str, group: Mapping[str, Any]) -> Any:
    """Return one hyperparameter as ``group`` has it, a number or a tensor; the rule's default if it has none."""
    if name in group:
        return group[name]
    source = next((each for each in _sources(rule) if each.name == name), None)
    if source is None or source.plural not in group:
        return rule.defaults.get(name)
    return group[source.plural][source.item]


def number_of(name: str, value: Any) -> float:
    """Return a group's value as a double; TypeError for None and texts, RuntimeError for large tensors (as torch)."""
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r}{'' if value is None else ', a text'}; give a number")
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def tuple_of_betas(given: Any) -> Any:
    """Return a sequence of numbers or tensors as a tuple, as torch's AdamW does; NumPy's numbers become Python's.

    How many there are is not looked at.  Raises TypeError for what is no sequence, and for an item that is no number.
    """
    try:
        if isinstance(given, str | bytes | Mapping | Set):
            raise TypeError
        betas = tuple([beta.item() if isinstance(beta, np.generic | np.ndarray) else beta for beta in given])
        for beta in betas:
            if not isinstance(beta, torch.Tensor):
                number_of("betas", beta)
    except (TypeError, ValueError):
        raise TypeError(f"betas is {given!r}; give two numbers, as betas=(0.9, 0.999)") from None
    return betas


@functools.cache
def group_keys(rule: Rule) -> frozenset[str]:
    """Return the keys under which groups may have the rule's hyperparameters: ``beta1``, and ``betas``."""
    return frozenset(key for source in _sources(rule) for key in (source.name, source.plural) if key)


class _Source(NamedTuple):
    """Where groups have a hyperparameter: under ``name``, or in a tuple.

    Attributes:
        plural, item: the tuple's name and the index in it; "" if there is no tuple.
        length: to be compared with the tuple's; 0: another item does that, or the rule takes only some items.
        is_switch: whether it is a bool.
    """

    name: str
    plural: str
    item: int
    length: int
    is_switch: bool


@functools.cache
def _sources(rule: Rule) -> list[_Source]:
    """Return the source of each hyperparameter that groups hold."""
    stems = {n: n.rstrip("0123456789") for n in rule.scalars if n != "step" and n not in rule.carried}
    found = []
    for name, stem in stems.items():
        numbers = {int(n[len(stem) :]) for n, of in stems.items() if of == stem != n}
        plural, item = (f"{stem}s", int(name[len(stem) :]) - 1) if stem != name else ("", 0)
        checks = item == 0 and len(numbers) > 1 and numbers == {*range(1, len(numbers) + 1)}
        is_switch = isinstance(rule.defaults.get(name), bool)
        found.append(_Source(name, plural, item, len(numbers) if checks else 0, is_switch))
    return found
