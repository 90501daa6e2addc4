"""A rule's hyperparameters as groups hold them, and the numbers that a launch carries for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rules import Rule

Uniforms = Sequence[Sequence[float]] | npt.NDArray[np.float64]

#: So many sets or more are computed at once.
FEW = 6


def scalars_of(rule: Rule, group: Mapping[str, Any]) -> dict[str, float]:
    """What ``group`` has of the rule's hyperparameters, by name, in double; tensors of one element are read.

    A tuple by a plural name gives its members by number: ``betas`` is ``beta1``, ``beta2``.
    """
    found = {}
    for name in rule.scalars:
        if name in group:
            found[name] = float(group[name])
        elif (member := _member(name)) and member[0] in group:
            found[name] = float(group[member[0]][member[1]])
    return found


@functools.cache
def _member(name: str) -> tuple[str, int] | None:
    """The tuple that holds the hyperparameter, and where in it."""
    stem = name.rstrip("0123456789")
    return (f"{stem}s", int(name[len(stem) :]) - 1) if stem != name else None


def uniforms_of(
    rule: Rule, groups: Sequence[Mapping[str, Any]], sets: Sequence[tuple[int, npt.NDArray[np.float64]]]
) -> Uniforms:
    """The numbers of each set of hyperparameters.

    Args:
        groups: of the optimizer.
        sets: (the index of a group, the step numbers in it).

    Raises:
        as :meth:`Rule.uniforms`.
    """
    found: list[Any] = []
    for index, steps in sets:
        scalars = scalars_of(rule, groups[index])
        if "step" not in rule.scalars:
            found.append([rule.uniforms(scalars)])
        elif len(steps) < FEW:
            found.append([rule.uniforms({**scalars, "step": step}) for step in steps.tolist()])
        else:
            found.append(rule.uniform_sets({**scalars, "step": steps}))
    return found[0] if len(found) == 1 else np.concatenate([np.asarray(each) for each in found])
