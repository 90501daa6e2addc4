"""``compose``: several rules as one, in one launch and with the bits of one launch after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ..formats.choice import Moment
from .language.syntax import RuleError, Signature
from .language.trace import Node, Raw
from .rule import Rule, check_rule


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number behind it if it is taken."""
    return next(found for i in itertools.count(1) if (found := f"{name}_{i}" if i > 1 else name) not in taken)


def compose(*rules: Rule) -> Rule:
    """Make one rule of several, of which each takes what those before it have changed.

    The first two tensors (parameter and gradient) are the same for all; of state each rule has its own, and so of
    numbers that it returns: a name that was there before gets ``_2``, ``_3``, …  Other hyperparameters of one name are
    one; a tensor with such a name gets a number, too.
    Between two rules a value is rounded as its list stores it, but not where another rule calls what is made here.  All
    compute in float64 if any list is float64.

    Raises:
        RuleError: one returns a number that another takes as a hyperparameter; they have different defaults for one;
            all together have more than 16 tensors.
        TypeError: there are none, or one is no :class:`Rule`.

    Example:
        >>> @pagedopt.rule
        ... def clipped(param, grad, *, most):
        ...     grad = max(-most, min(grad, most))
        ...     return grad
        >>> both = pagedopt.compose(clipped, pagedopt.rules.adamw)
    """
    for each in rules:
        check_rule(each)
    if not rules:
        raise TypeError("compose() takes rules; there are none")
    rules = tuple(part for each in rules for part in each.parts or (each,))
    name = "_then_".join(each.name for each in rules)
    title = f"rule {name!r}"
    given = {n for each in rules for n in each.scalars}
    inputs = list[str]()
    for n in max((each.inputs[:2] for each in rules), key=len):  # a hyperparameter of another rule may have that name
        inputs.append(_free(n, {*given, *inputs}))
    shared = tuple(inputs)
    scalars = list(dict.fromkeys(n for each in rules for n in each.scalars if n not in each.counted))
    if both := [n for each in rules for n in each.counted if n in scalars]:
        raise RuleError(f"{title}: {both[0]!r} is a number that one of them counts, and another is given; rename it")
    plan: list[tuple[Rule, dict[str, str]]] = []  # names of the rule → those of all together
    moments, defaults = dict[str, Moment](), dict[str, float]()
    for each in rules:
        names = {n: n for n in each.scalars} | dict(zip(each.inputs[:2], shared, strict=False))
        for own, all_names in ((each.inputs[2:], inputs), (each.counted, scalars)):
            for n in own:
                names[n] = _free(n, {*inputs, *scalars})
                all_names.append(names[n])
        plan.append((each, names))
        moments |= {names[n]: replace(m, decay=m.decay and names[m.decay]) for n, m in each.moments.items()}
        for n, value in each.defaults.items():
            before = defaults.setdefault(names[n], value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                raise RuleError(f"{title}: two defaults of {n!r}, {defaults[names[n]]!r} and {value!r}; give one")
    needed = {names[n] for each, names in plan for n in each.scalars if n not in each.defaults}
    defaults = {n: value for n, value in defaults.items() if n not in needed}
    if len(inputs) > 16:
        raise RuleError(f"{title}: {len(inputs)} tensors; there may be 16")
    changes = tuple(sorted({inputs.index(names[each.inputs[i]]) for each, names in plan for i in each.changes}))
    returned = (*(inputs[i] for i in changes), *(names[n] for each, names in plan for n in each.counted))

    def composed(*elements: Any, **given: Any) -> Any:
        found, changed = {**dict(zip(inputs, elements, strict=True)), **given}, set[str]()

        def taken(name: str) -> Any:
            if name in changed and isinstance(elements[0], Node) and elements[0].trace.signature is made:
                return elements[0].trace.node("stored", Raw(inputs.index(name)), found[name])
            return found[name]

        for each, names in plan:
            scalars = {n: found[names[n]] for n in each.scalars if names[n] in found}
            result = each(*(taken(names[n]) for n in each.inputs), **scalars)
            new = [names[n] for n in each.returned or each.inputs[:1]]
            found |= dict(zip(new, result if isinstance(result, tuple) else (result,), strict=True))
            changed |= {*new} & {*inputs}
        return tuple(found[n] for n in returned)

    names_of = name, tuple(inputs), tuple(scalars)
    signature = Signature(*names_of, defaults, changes, changes, returned, frozenset(returned))
    made = Rule(composed, moments, signature, rules)
    return made


def unrounded(composed: Rule) -> Rule:
    """Return what :func:`compose` has made without roundings between its rules, for lists rounded at random."""
    return Rule(composed.function, composed.moments, composed._said, composed.parts)
