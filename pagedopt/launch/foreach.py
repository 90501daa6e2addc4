"""The elementwise ``torch._foreach_*`` functions and the norm, over one pointer list.

They take what torch's take.  What does not fit one launch here (integers, broadcasting, mixed dtypes, tensors that
need autograd) goes to torch's own function, whose results and errors are then torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import rules
from ..formats.floating import known
from ..rules import Rule
from .sweep import Sweep, shared_transport

Tensors = Sequence[torch.Tensor]
#: Per call: one number for all tensors, or one for each.
Numbers = float | Sequence[float]


def _fits(lists: Sequence[Tensors]) -> bool:
    """Whether our kernels give what torch gives: equal lengths, shapes and dtype, floating point, no autograd."""
    first = lists[0]
    if not first or any(not isinstance(x, list | tuple) or len(x) != len(first) for x in lists):
        return False
    tensors = [t for x in lists for t in x]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return False
    dtypes, devices = {t.dtype for t in tensors}, {t.device.type for t in tensors}
    return (
        len(dtypes) == 1
        and all(map(known, dtypes))
        and devices <= {"cpu", "cuda"}
        and len({t.device for t in tensors}) == 1
        and {t.layout for t in tensors} == {torch.strided}
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and all([t.shape for t in x] == [t.shape for t in first] for x in lists[1:])
    )


def _apply(
    rule: Rule,
    lists: Sequence[Tensors],
    theirs: Callable[[], Any],
    *,
    in_place: bool,
    scalars: Mapping[str, Numbers] | None = None,
) -> list[torch.Tensor] | None:
    """Run ``rule`` over ``lists``, into the first of them or into new tensors; or ``theirs`` where it does not fit."""
    if not _fits(lists) or not all(_is_number(v, len(lists[0])) for v in (scalars or {}).values()):
        result: list[torch.Tensor] | None = theirs()
        return None if in_place else result
    rows = _per_tensor(scalars or {}, len(lists[0]))
    out = None
    if not in_place:
        out = [torch.empty_like(t) for t in lists[0]]
        rule, lists = rule.out_of_place, [*lists, out]
    try:
        sweep = Sweep(rule, lists, transport=shared_transport("managed", lists), sets=len(rows))
    except ValueError:  # strides differ, gaps, overlap: torch knows what to do, or what to say
        result = theirs()
        return None if in_place else result
    if len(rows) > 1:
        sweep.table.assign_sets(np.arange(len(rows)))
    with torch.no_grad():
        sweep.launch([rule.uniforms(row) for row in rows])
        if in_place:
            torch.autograd.graph.increment_version(lists[0])
    return out


def _is_number(value: Any, count: int) -> bool:
    if isinstance(value, list | tuple):
        return len(value) == count and all(isinstance(v, int | float) for v in value)
    return isinstance(value, int | float)


def _per_tensor(scalars: Mapping[str, Numbers], count: int) -> list[dict[str, float]]:
    """One set of scalars for all tensors, or one for each."""
    if not any(isinstance(v, list | tuple) for v in scalars.values()):
        return [scalars]  # type: ignore[list-item]
    return [
        {name: v[i] if isinstance(v, list | tuple) else v for name, v in scalars.items()}  # type: ignore[misc]
        for i in range(count)
    ]


def _is_list(value: Any) -> bool:
    """A list of tensors, as opposed to one number or a list of numbers."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _binary(name: str, self: Tensors, other: Any, in_place: bool, **alpha: float) -> list[torch.Tensor] | None:
    suffix = "_" if in_place else ""
    theirs = getattr(torch, f"_foreach_{name}{suffix}")
    if _is_list(other):
        rule, lists, scalars = rules.RULES[name], [self, other], dict(alpha)
    else:
        rule, lists, scalars = rules.RULES[f"{name}_scalar"], [self], {"scalar": other}
    return _apply(rule, lists, lambda: theirs(self, other, **alpha), in_place=in_place, scalars=scalars)


def foreach_add(self: Tensors, other: Any, *, alpha: float = 1) -> list[torch.Tensor]:
    """self[i] + alpha * other[i]; ``other`` is a list of tensors, a number, or a number for each tensor."""
    options = {"alpha": alpha} if _is_list(other) or alpha != 1 else {}
    return _binary("add", self, other, False, **options)  # type: ignore[return-value]


def foreach_add_(self: Tensors, other: Any, *, alpha: float = 1) -> None:
    """:func:`foreach_add` in place."""
    _binary("add", self, other, True, **({"alpha": alpha} if _is_list(other) or alpha != 1 else {}))


def foreach_mul(self: Tensors, other: Any) -> list[torch.Tensor]:
    """self[i] * other[i]; ``other`` is a list of tensors, a number, or a number for each tensor."""
    return _binary("mul", self, other, False)  # type: ignore[return-value]


def foreach_mul_(self: Tensors, other: Any) -> None:
    """:func:`foreach_mul` in place."""
    _binary("mul", self, other, True)


def _lerp(self: Tensors, end: Tensors, weight: Any, in_place: bool) -> list[torch.Tensor] | None:
    theirs = getattr(torch, f"_foreach_lerp{'_' if in_place else ''}")
    if _is_list(weight):
        rule, lists, scalars = rules.lerp_tensor, [self, end, weight], {}
    else:
        rule, lists, scalars = rules.lerp, [self, end], {"weight": weight}
    return _apply(rule, lists, lambda: theirs(self, end, weight), in_place=in_place, scalars=scalars)


def foreach_lerp(self: Tensors, end: Tensors, weight: Any) -> list[torch.Tensor]:
    """self[i] + weight * (end[i] - self[i]); ``weight`` is a number, one per tensor, or a list of tensors."""
    return _lerp(self, end, weight, False)  # type: ignore[return-value]


def foreach_lerp_(self: Tensors, end: Tensors, weight: Any) -> None:
    """:func:`foreach_lerp` in place."""
    _lerp(self, end, weight, True)


def _pointwise(name: str, lists: list[Tensors], value: Any, in_place: bool) -> list[torch.Tensor] | None:
    theirs = getattr(torch, f"_foreach_{name}{'_' if in_place else ''}")
    how = {} if isinstance(value, list | tuple | torch.Tensor) else {"value": value}
    extra = () if how else (value,)
    return _apply(
        rules.RULES[name], lists, lambda: theirs(*lists, *extra, **how), in_place=in_place, scalars={"value": value}
    )


def foreach_addcmul(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> list[torch.Tensor]:
    """self[i] + value * tensor1[i] * tensor2[i]; ``value`` is a number or one per tensor."""
    return _pointwise("addcmul", [self, tensor1, tensor2], value, False)  # type: ignore[return-value]


def foreach_addcmul_(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> None:
    """:func:`foreach_addcmul` in place."""
    _pointwise("addcmul", [self, tensor1, tensor2], value, True)


def foreach_addcdiv(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> list[torch.Tensor]:
    """self[i] + value * tensor1[i] / tensor2[i]; ``value`` is a number or one per tensor."""
    return _pointwise("addcdiv", [self, tensor1, tensor2], value, False)  # type: ignore[return-value]


def foreach_addcdiv_(self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Any = 1) -> None:
    """:func:`foreach_addcdiv` in place."""
    _pointwise("addcdiv", [self, tensor1, tensor2], value, True)


def foreach_sqrt(self: Tensors) -> list[torch.Tensor]:
    """sqrt(self[i])"""
    return _apply(rules.square_root, [self], lambda: torch._foreach_sqrt(list(self)), in_place=False)  # type: ignore[return-value]


def foreach_sqrt_(self: Tensors) -> None:
    """:func:`foreach_sqrt` in place."""
    _apply(rules.square_root, [self], lambda: torch._foreach_sqrt_(list(self)), in_place=True)


__all__ = [
    "foreach_add", "foreach_add_", "foreach_addcdiv", "foreach_addcdiv_", "foreach_addcmul", "foreach_addcmul_",
    "foreach_lerp", "foreach_lerp_", "foreach_mul", "foreach_mul_", "foreach_sqrt", "foreach_sqrt_",
]  # fmt: skip
