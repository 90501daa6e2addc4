"""A rule's hyperparameters: how groups give them, and the numbers that a launch carries for them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...rules import Rule
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Values

#: For each set of hyperparameters, what a kernel gets for it (:meth:`Rule.uniforms`).
Uniforms = Sequence[Sequence[float]] | npt.NDArray[np.float64]
#: For each group in use: (its index, the first row of each of its sets; an int instead of an array if it has one).
SetsByGroup = Sequence[tuple[int, int | npt.NDArray[np.int64]]]


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


def number_of(name: str, value: Any) -> float:
    """Return a group's value as a double; TypeError for None and texts, RuntimeError for large tensors (as torch)."""
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r}{'' if value is None else ', a text'}; give a number")
    return float(value.item() if isinstance(value, torch.Tensor) else value)


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


def uniforms_of(
    rule: Rule,
    optimizer: RuleOptimizer,
    leaders: SetsByGroup,
    own: Mapping[str, Values | float],
) -> Uniforms:
    """Return the numbers of each set of hyperparameters.

    Args:
        leaders: the sets.
        own: hyperparameters that each row has for itself, by name; one number if all rows have the same.

    Raises:
        KeyError, ValueError, TypeError: see :func:`scalars_of`.
        TypeError, ArithmeticError, RuntimeError, RuleError: see :meth:`Rule.uniforms`.
    """
    found: list[Any] = []
    for index, rows in leaders:
        scalars: dict[str, Any] = scalars_of(rule, optimizer.param_groups[index], optimizer.defaults)
        for name, values in own.items():
            if isinstance(values, float):
                scalars[name] = values if isinstance(rows, int) else np.full(len(rows), values)
            else:
                scalars[name] = float(values[rows]) if isinstance(rows, int) else values[rows]
        found.append([rule.uniforms(scalars)] if isinstance(rows, int) else rule.uniform_sets(scalars))
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if any(isinstance(s, np.ndarray) for s in found) else [s for (s,) in found]


class Pattern(NamedTuple):
    """Which rows share a set of hyperparameters.

    Attributes:
        absent: rows that take no step and are in no set.
        groups: the sets, by group.
        sets: the set of each row.
        leaders: for each row, the first row of its set.
        used: the number of sets.
    """

    absent: list[int]
    groups: SetsByGroup
    sets: npt.NDArray[np.int64]
    leaders: npt.NDArray[np.int64]
    used: int

    def holds(self, own: Mapping[str, Values | float]) -> bool:
        """Tell whether the rows of each set have the same ``own`` values, to the bit."""
        for values in own.values():
            if not isinstance(values, float) and values.tobytes() != values[self.leaders].tobytes():
                return False
        return True


def find_pattern(groups: Sequence[int], absent: Sequence[int], own: Mapping[str, Values | float]) -> Pattern:
    """Put rows of one group with equal ``own`` hyperparameters (see :func:`uniforms_of`) into one set."""
    if len(groups) == 1 and not absent:
        return _alone(groups[0])
    of_rows = keys = np.array(groups, np.int64)
    for values in (values for values in own.values() if not isinstance(values, float)):
        distinct, rank = np.unique(values.view(np.int64), return_inverse=True)  # as bits: NaN equals NaN
        keys = keys * len(distinct) + rank
    present = np.setdiff1d(np.arange(len(keys)), absent)
    _, first, inverse = np.unique(keys[present], return_index=True, return_inverse=True)
    rows = present[first]  # sorted by group, which is the leading part of a key
    ends = np.flatnonzero(np.diff(of_rows[rows])) + 1
    parts = [(int(of_rows[p[0]]), int(p[0]) if len(p) == 1 else p) for p in np.split(rows, ends)]
    if len(rows) == 1 and not absent:
        sets = leaders = _zeros(len(keys))
    else:
        sets, leaders = np.zeros(len(keys), np.int64), np.arange(len(keys))
        sets[present] = inverse
        leaders[present] = rows[inverse]
    return Pattern(list(absent), tuple(parts), sets, leaders, len(rows))


@functools.lru_cache(maxsize=16)
def _alone(group: int) -> Pattern:
    """Return the pattern of one row; cached, as thousands of optimizers may have one row each."""
    return Pattern([], ((group, 0),), _zeros(1), _zeros(1), 1)


@functools.lru_cache(maxsize=16)
def _zeros(count: int) -> npt.NDArray[np.int64]:
    """Return read-only zeros, which all patterns of as many rows share."""
    found = np.zeros(count, np.int64)
    found.flags.writeable = False
    return found
