"""A rule's hyperparameters as groups hold them, and the numbers that a launch carries for them."""

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

Uniforms = Sequence[Sequence[float]] | npt.NDArray[np.float64]


#: (group, a row of each set of hyperparameters in it: an index, or several)
Leaders = Sequence[tuple[int, int | npt.NDArray[np.int64]]]


def scalars_of(rule: Rule, group: Mapping[str, Any], needed: Collection[str] = ()) -> dict[str, float]:
    """What ``group`` has of the rule's hyperparameters, by name, in double; tensors of one element are read.

    A tuple by a plural name gives its members by number: ``betas`` is ``beta1``, ``beta2``.  What the rule knows as
    True or False is whatever Python takes for that.

    Raises:
        KeyError: there is none of those that are ``needed`` (as torch).
        ValueError: a tuple has more members than the rule takes, or fewer (as torch).
        TypeError: a value is no number.
    """
    found = {}
    for name, plural, number, members, is_switch in _places(rule):
        if name in group:
            value = group[name]
        elif plural in group:
            value = group[plural]
            if members and len(value) != members:
                raise ValueError(f"{plural} is {value}; rule {rule.name!r} takes {members} of them")
            value = value[number]
        elif name in needed or plural in needed:
            raise KeyError(name if name in needed else plural)
        else:
            continue
        if type(value) is not float:
            value = (1.0 if value else 0.0) if is_switch else number_of(name, value)
        found[name] = value
    return found


def number_of(name: str, value: Any) -> float:
    """``value`` of a group by ``name``, in double.

    Raises:
        TypeError: it is none; a text is none, either.
        RuntimeError: it is a tensor of more elements than one, or of none (as torch).
    """
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r}{'' if value is None else ', a text'}; give a number")
    return float(value.item() if isinstance(value, torch.Tensor) else value)


class _Place(NamedTuple):
    """Where groups have a hyperparameter: by ``name``, or with others in a tuple.

    Attributes:
        plural, number: the tuple's name, and the place in it; "" if there is none.
        members: how many the tuple has; 0 where that is not to be asked, as another place has asked it, or the rule
            takes but some of them.
        is_switch: whether it is True or False.
    """

    name: str
    plural: str
    number: int
    members: int
    is_switch: bool


@functools.cache
def _places(rule: Rule) -> list[_Place]:
    """Those of all hyperparameters that groups hold."""
    stems = {n: n.rstrip("0123456789") for n in rule.scalars if n != "step" and n not in rule.carried}
    numbers: dict[str, set[int]] = {}
    for name, stem in stems.items():
        if stem != name:
            numbers.setdefault(stem, set()).add(int(name[len(stem) :]))
    found = []
    for name, stem in stems.items():
        is_switch, there = isinstance(rule.defaults.get(name), bool), numbers.get(stem, set())
        plural, number = (f"{stem}s", int(name[len(stem) :]) - 1) if stem != name else ("", 0)
        all_of_them = len(there) > 1 and there == set(range(1, len(there) + 1))
        found.append(_Place(name, plural, number, len(there) if all_of_them and number == 0 else 0, is_switch))
    return found


def uniforms_of(
    rule: Rule,
    optimizer: RuleOptimizer,
    leaders: Leaders,
    own: Mapping[str, Values | float],
    rounded: Collection[str] = (),
) -> Uniforms:
    """The numbers of each set of hyperparameters.

    Args:
        optimizer: with the groups.
        leaders: which sets there are.
        own: by name, the hyperparameters that each row has for itself, or one number where all have the same.
        rounded: names of those that are rounded to float32 before anything is computed of them.  Of a running mean
            ``b * mean + (1 - b) * x`` both weights, rounded each for itself, have not quite the sum 1: for b = 0.999
            the mean ends 1.3e-5 too high.

    Raises:
        KeyError, ValueError, TypeError: see :func:`scalars_of`.
        TypeError, ArithmeticError, RuntimeError, RuleError: see :meth:`Rule.uniforms`.
    """
    found: list[Any] = []
    for index, rows in leaders:
        scalars: dict[str, Any] = scalars_of(rule, optimizer.param_groups[index], optimizer.defaults)
        for name in rounded:
            if name in scalars:
                scalars[name] = float(np.float32(scalars[name]))
        for name, values in own.items():
            if isinstance(values, float):
                scalars[name] = values if isinstance(rows, int) else np.full(len(rows), values)
            else:
                scalars[name] = float(values[rows]) if isinstance(rows, int) else values[rows]
        found.append([rule.uniforms(scalars)] if isinstance(rows, int) else rule.uniform_sets(scalars))
    if len(found) == 1:
        sets: Uniforms = found[0]
        return sets
    return np.concatenate(found) if any(isinstance(s, np.ndarray) for s in found) else [s for (s,) in found]


class Pattern(NamedTuple):
    """Which rows share a set of hyperparameters.

    Attributes:
        absent: the rows that take no step, and are in no set.
        groups: the group of each set, and one of its rows.
        sets: the set of each row.
        leaders: of each row the first one of its set.
        used: how many sets there are.
    """

    absent: list[int]
    groups: Leaders
    sets: npt.NDArray[np.int64]
    leaders: npt.NDArray[np.int64]
    used: int

    def holds(self, own: Mapping[str, Values | float]) -> bool:
        """Whether rows of one set have the same ``own`` values, to the bit."""
        for values in own.values():
            if not isinstance(values, float) and values.tobytes() != values[self.leaders].tobytes():
                return False
        return True


def find_pattern(groups: Sequence[int], absent: Sequence[int], own: Mapping[str, Values | float]) -> Pattern:
    """Rows of one group whose own hyperparameters are alike share a set.

    Args:
        groups: of each row.
        absent: the rows that take no step.
        own: by name, the hyperparameters that each row has for itself, or one number where all have the same.
    """
    if len(groups) == 1 and not absent:
        return _alone(groups[0])
    of_rows = keys = np.array(groups, np.int64)
    for values in (values for values in own.values() if not isinstance(values, float)):
        distinct, rank = np.unique(values.view(np.int64), return_inverse=True)  # bits: NaN is a value like any other
        keys = keys * len(distinct) + rank
    present = np.setdiff1d(np.arange(len(keys)), absent)
    _, first, inverse = np.unique(keys[present], return_index=True, return_inverse=True)
    rows = present[first]  # in the order of groups
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
    """One for all who have one row: there may be thousands."""
    return Pattern([], ((group, 0),), _zeros(1), _zeros(1), 1)


@functools.lru_cache(maxsize=16)
def _zeros(count: int) -> npt.NDArray[np.int64]:
    """One for all patterns of so many rows; to read."""
    found = np.zeros(count, np.int64)
    found.flags.writeable = False
    return found
