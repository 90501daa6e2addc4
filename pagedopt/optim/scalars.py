"""A rule's hyperparameters as groups hold them, and the numbers that a launch carries for them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rules import Rule
from .owner import Owner
from .steps import Values

Uniforms = Sequence[Sequence[float]] | npt.NDArray[np.float64]


#: (group, a row of each set of hyperparameters in it: an index, or several)
Pattern = Sequence[tuple[int, int | npt.NDArray[np.int64]]]


def scalars_of(rule: Rule, group: Mapping[str, Any], needed: Collection[str] = ()) -> dict[str, float]:
    """What ``group`` has of the rule's hyperparameters, by name, in double; tensors of one element are read.

    A tuple by a plural name gives its members by number: ``betas`` is ``beta1``, ``beta2``.

    Raises:
        KeyError: there is none of those that are ``needed`` (as torch).
    """
    found = {}
    for name, plural, number in _places(rule):
        if name in group:
            found[name] = float(group[name])
        elif plural in group:
            found[name] = float(group[plural][number])
        elif name in needed or plural in needed:
            raise KeyError(name if name in needed else plural)
    return found


@functools.cache
def _places(rule: Rule) -> list[tuple[str, str, int]]:
    """For each hyperparameter that groups hold: its name, the tuple that may hold it instead, and where in it."""
    stems = [(n, n.rstrip("0123456789")) for n in rule.scalars if n != "step" and n not in rule.carried]
    return [(name, f"{stem}s", int(name[len(stem) :]) - 1) if stem != name else (name, "", 0) for name, stem in stems]


def uniforms_of(rule: Rule, optimizer: Owner, pattern: Pattern, own: Mapping[str, Values]) -> Uniforms:
    """The numbers of each set of hyperparameters.

    Args:
        optimizer: with the groups.
        pattern: which sets there are.
        own: by name, the hyperparameters that each row has for itself.

    Raises:
        KeyError: see :func:`scalars_of`.
        TypeError, ArithmeticError, RuntimeError, RuleError: see :meth:`Rule.uniforms`.
    """
    found: list[Any] = []
    for index, rows in pattern:
        scalars: dict[str, Any] = scalars_of(rule, optimizer.param_groups[index], optimizer.defaults)
        for name, values in own.items():
            scalars[name] = float(values[rows]) if isinstance(rows, int) else values[rows]
        found.append([rule.uniforms(scalars)] if isinstance(rows, int) else rule.uniform_sets(scalars))
    if len(found) == 1:
        sets: Uniforms = found[0]
        return sets
    return np.concatenate(found) if any(isinstance(s, np.ndarray) for s in found) else [s for (s,) in found]
