"""The rules that leave the same bits everywhere, and lists to show it: all dtypes, special values, several sets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rules_under_test import SPECIAL, same_values
from support import BF16, DTYPES, F32, F64, lists_for, scalars_for

from pagedopt.rules import RULES, Rule

Tensors = list[list[torch.Tensor]]
#: Of each set of hyperparameters a tensor with a tail.
SIZES = (4097, 4098, 4099, 0, 1, 130)
#: dtypes of parameters and gradients, and of state.
STORED = {str(dtype)[6:]: (dtype, dtype) for dtype in DTYPES} | {
    "bfloat16, state float32": (BF16, F32),
    "float32, state bfloat16": (F32, BF16),
}
#: Betas on either side of a half, and 0; every switch on and off.
_SETS: tuple[dict[str, float], ...] = (
    {},
    {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "nesterov": False, "weight": 0.7},
    {"beta1": 0.4, "beta2": 0.0, "maximize": True, "momentum": 0.0, "dampening": 0.0, "alpha": 1.0, "value": 1.0},
)


def _is_exact(rule: Rule) -> bool:
    """Whether IEEE says how each of its operations rounds: of ``exp``, ``log`` and ``tanh`` it does not."""
    return not any(name in rule.cuda_source() for name in ("element_exp", "element_log", "element_tanh"))


#: Rules, and names of what they are stored in.
CASES = [
    (rule, stored)
    for rule in RULES.values()
    for stored, (own, of_state) in STORED.items()
    if _is_exact(rule) and (own is of_state or len(rule.inputs) > 2)
]


def name_of(case: tuple[Rule, str]) -> str:
    """For the id of a test."""
    return f"{case[0].name}-{case[1]}"


def dtypes_of(rule: Rule, stored: str) -> tuple[torch.dtype, ...]:
    """The dtype of each list."""
    own, of_state = STORED[stored]
    return tuple(own if i < 2 else of_state for i in range(len(rule.inputs)))


def spoilt(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy of which every eighth element is a special value, a denormal of its dtype among them."""
    small = torch.finfo(t.dtype).tiny / 4
    values = torch.tensor([*SPECIAL, small, -small], dtype=F64).to(t.dtype)
    drawn = values[torch.randint(len(values), t.shape, generator=generator)]
    return torch.where(torch.rand(t.shape, generator=generator) < 1 / 8, drawn, t)


def special_lists(rule: Rule, stored: str, sizes: Sequence[int] = SIZES) -> Tensors:
    """A list for each input, special values among ordinary ones."""
    generator = torch.Generator().manual_seed(1)
    lists = lists_for(rule, sizes, dtypes_of(rule, stored))
    return [[spoilt(t, generator) for t in tensors if t is not None] for tensors in lists]


def sets_in(rule: Rule, step: int) -> list[dict[str, float]]:
    """The hyperparameters of three sets in ``step``."""
    return [
        scalars_for(rule, step, **{name: value for name, value in own.items() if name in rule.scalars}) for own in _SETS
    ]


def assert_same_bits(rule: Rule, before: Tensors, mine: Tensors, others: Tensors) -> None:
    """Same numbers, and NaN in the same positions; enough numbers have changed to show it."""
    for j, name in enumerate(rule.inputs):
        for i, (a, b) in enumerate(zip(mine[j], others[j], strict=True)):
            assert same_values(a.cpu(), b.cpu()), f"{name} {i}: other bits"
        if j in rule.writes:
            new, old = torch.cat([t.cpu() for t in mine[j]]), torch.cat(before[j])
            assert (new.isfinite() & (new != old)).double().mean() > 0.1, f"{name}: few numbers to compare"
