"""The elementwise ``torch._foreach_*`` functions, each in one launch over one pointer table; and the norm, in few.

They take the arguments of torch's functions.  What does not fit one launch here (integers, broadcasting, mixed dtypes,
tensors that need autograd) goes to torch's own function, whose results and errors are then torch's.

Example:
    >>> foreach_add_(params, grads, alpha=-0.1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .launch.sums import Tensors, fits
from .launch.sums import foreach_norm as foreach_norm
from .launch.sweep import Sweep, shared_transport
from .rules import Rule, elementwise

#: By the name of torch's function: the rule if the last argument is a number or one number per tensor, the name of that
#: number in the rule, and the rule if the last argument is a list of tensors.
_RULES: dict[str, tuple[Rule | None, str, Rule | None]] = {
    "add": (elementwise.add_scalar, "scalar", elementwise.add),
    "mul": (elementwise.mul_scalar, "scalar", elementwise.mul),
    "lerp": (elementwise.lerp, "weight", elementwise.lerp_tensor),
    "addcmul": (elementwise.addcmul, "value", None),
    "addcdiv": (elementwise.addcdiv, "value", None),
    "sqrt": (None, "", elementwise.square_root),
}


def _sets(scalars: Mapping[str, Any], count: int) -> list[dict[str, float]] | None:
    """Return one set of scalars for all ``count`` tensors, or one for each; None if there is no number for each."""
    several = {name: value for name, value in scalars.items() if isinstance(value, list | tuple)}
    if any(len(value) != count for value in several.values()):
        return None
    rows = [{**scalars, **{name: v[i] for name, v in several.items()}} for i in range(count if several else 1)]
    return rows if all(isinstance(v, int | float) for row in rows for v in row.values()) else None


def _launch(rule: Rule | None, lists: Sequence[Tensors], scalars: Mapping[str, Any], in_place: bool) -> Tensors | None:
    """Run ``rule`` and return the list with the results; None if only torch can."""
    sets = _sets(scalars, len(lists[0])) if rule is not None and fits(lists) else None
    if rule is None or sets is None:
        return None
    out = lists[0] if in_place else [torch.empty_like(t) for t in lists[0]]
    if not in_place:
        rule, lists = rule.out_of_place, [*lists, out]
    try:
        sweep = Sweep(rule, lists, transport=shared_transport("managed", lists), sets=len(sets))
    except ValueError:  # strides differ, gaps, overlap: torch computes it or raises its own error
        return None
    if len(sets) > 1:
        sweep.table.assign_sets(np.arange(len(sets)))
    with torch.no_grad():
        sweep.launch([rule.uniforms(scalars) for scalars in sets])
        if in_place:
            torch.autograd.graph.increment_version(out)
    return out


def _foreach(name: str, *arguments: Any, alpha: float = 1) -> Any:
    """Compute ``torch._foreach_{name}``; a name that ends with ``_`` overwrites the first list, and returns None."""
    *lists, last = arguments
    in_place, options = name.endswith("_"), {"alpha": alpha} if alpha != 1 else {}
    with_number, number, with_tensors = _RULES[name.removesuffix("_")]
    if with_number is None or (isinstance(last, list | tuple) and last and isinstance(last[0], torch.Tensor)):
        out = _launch(with_tensors, arguments, options, in_place)
    else:  # torch refuses alpha beside a number
        out = None if options else _launch(with_number, lists, {number: last}, in_place)
    if out is None:
        out = getattr(torch, f"_foreach_{name}")(*arguments, **options)
    return None if in_place else list(out)


def foreach_add(self: Tensors, other: Any, *, alpha: float = 1) -> list[torch.Tensor]:
    """self[i] + alpha * other[i]; ``other`` is a list of tensors, a number, or a number for each tensor."""
    return _foreach("add", self, other, alpha=alpha)


def foreach_add_(self: Tensors, other: Any, *, alpha: float = 1) -> None:
    """:func:`foreach_add` in place."""
    _foreach("add_", self, other, alpha=alpha)


def foreach_mul(self: Tensors, other: Any) -> list[torch.Tensor]:
    """self[i] * other[i]; ``other`` is a list of tensors, a number, or a number for each tensor."""
    return _foreach("mul", self, other)


def foreach_mul_(self: Tensors, other: Any) -> None:
    """:func:`foreach_mul` in place."""
    _foreach("mul_", self, other)


def foreach_lerp(self: Tensors, end: Tensors, weight: Any) -> list[torch.Tensor]:
    """self[i] + weight * (end[i] - self[i]); ``weight`` is a number, one per tensor, or a list of tensors."""
    return _foreach("lerp", self, end, weight)


def foreach_lerp_(self: Tensors, end: Tensors, weight: Any) -> None:
    """:func:`foreach_lerp` in place."""
    _foreach("lerp_", self, end, weight)


def foreach_addcmul(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> list[torch.Tensor]:
    """self[i] + value * tensor1[i] * tensor2[i]; ``value`` is a number or one per tensor."""
    return _foreach("addcmul", self, tensor1, tensor2, value)


def foreach_addcmul_(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> None:
    """:func:`foreach_addcmul` in place."""
    _foreach("addcmul_", self, tensor1, tensor2, value)


def foreach_addcdiv(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> list[torch.Tensor]:
    """self[i] + value * tensor1[i] / tensor2[i]; ``value`` is a number or one per tensor."""
    return _foreach("addcdiv", self, tensor1, tensor2, value)


def foreach_addcdiv_(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> None:
    """:func:`foreach_addcdiv` in place."""
    _foreach("addcdiv_", self, tensor1, tensor2, value)


def foreach_sqrt(self: Tensors) -> list[torch.Tensor]:
    """sqrt(self[i])"""
    return _foreach("sqrt", self)


def foreach_sqrt_(self: Tensors) -> None:
    """:func:`foreach_sqrt` in place."""
    _foreach("sqrt_", self)


__all__ = [
    "foreach_add", "foreach_add_", "foreach_addcdiv", "foreach_addcdiv_", "foreach_addcmul", "foreach_addcmul_",
    "foreach_lerp", "foreach_lerp_", "foreach_mul", "foreach_mul_", "foreach_norm", "foreach_sqrt", "foreach_sqrt_",
]  # fmt: skip
