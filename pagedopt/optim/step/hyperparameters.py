"""A rule's hyperparameters: how groups give them, and the numbers that a launch carries for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...rules import Rule
from ..state.group_scalars import number_of, scalars_of
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Values

#: For each set of hyperparameters, what a kernel gets for it (:meth:`Rule.uniforms`).
Uniforms = Sequence[Sequence[float]] | npt.NDArray[np.float64]
#: For each group in use: (its index, the first row of each of its sets; an int instead of an array if it has one).
SetsByGroup = Sequence[tuple[int, int | npt.NDArray[np.int64]]]

#: Hyperparameters of groups, by the group's index.
KnownScalars = dict[int, dict[str, Any]]


def uniforms_of(
    rule: Rule,
    optimizer: RuleOptimizer,
    leaders: SetsByGroup,
    own: Mapping[str, Values | float],
    known: KnownScalars,
) -> Uniforms:
    """Return the numbers of each set of hyperparameters.

    Args:
        leaders: the sets.
        own: hyperparameters that each row has for itself, by name; one number if all rows have the same.
        known: what groups are known to hold; what it lacks is entered.

    Raises:
        KeyError, ValueError, TypeError: see :func:`scalars_of`.
        TypeError, ArithmeticError, RuntimeError, RuleError: see :meth:`Rule.uniforms`.
    """
    found: list[Any] = []
    for index, rows in leaders:
        if (scalars := known.get(index)) is None:
            scalars = known[index] = scalars_of(rule, optimizer.param_groups[index], optimizer.defaults)
        scalars = scalars.copy()
        for name, values in own.items():
            if isinstance(values, float):
                scalars[name] = values if isinstance(rows, int) else np.full(len(rows), values)
            else:
                scalars[name] = float(values[rows]) if isinstance(rows, int) else values[rows]
        if isinstance(rows, int):
            found.append([rule.uniforms(scalars)])
        elif own:
            found.append(rule.uniform_sets(scalars))
        else:  # sets that differ in their seeds alone
            found.append(np.array([rule.uniforms(scalars)] * len(rows)))
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
    of_rows = keys = np.array(groups, np.int64)
    for values in (values for values in own.values() if not isinstance(values, float)):
        distinct, rank = np.unique(values.view(np.int64), return_inverse=True)  # as bits: NaN equals NaN
        keys = keys * len(distinct) + rank
    present = np.setdiff1d(np.arange(len(keys)), absent)
    _, first, inverse = np.unique(keys[present], return_index=True, return_inverse=True)
    rows = present[first]  # sorted by group, which is the leading part of a key
    ends = np.flatnonzero(np.diff(of_rows[rows])) + 1
    parts = [(int(of_rows[p[0]]), int(p[0]) if len(p) == 1 else p) for p in np.split(rows, ends)]
    sets, leaders = np.zeros(len(keys), np.int64), np.arange(len(keys))
    sets[present] = inverse
    leaders[present] = rows[inverse]
    return Pattern(list(absent), tuple(parts), sets, leaders, len(rows))


__all__ = ["Pattern", "Uniforms", "find_pattern", "number_of", "scalars_of", "uniforms_of"]
