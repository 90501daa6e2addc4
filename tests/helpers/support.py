"""What several test files share: hyperparameters that are neither defaults nor zero, inputs, and the float64 judge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pagedopt import Moment
from pagedopt.rules import Rule
from tests.specs import CASES

Lists = list[list[torch.Tensor | None]]

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = (F32, F64, F16, BF16)
#: A tail for every vector width, a single element, nothing at all, and more than one chunk of 2,048.
SIZES = (0, 1, 3, 4097, 8, 130)

BETAS = (0.8, 0.95)
#: Of rules of lists.
_OF_LISTS: dict[str, float] = {"alpha": -1.7, "scalar": 0.37, "weight": 0.3, "value": 0.6}
#: A step moves a weight by about 0.3, a hundred half-steps of a bfloat16 near 1.
_OF_STEPS: dict[str, float] = {
    "lr": 0.3, "beta1": BETAS[0], "beta2": BETAS[1], "eps": 1e-3, "weight_decay": 0.2, "momentum": 0.7,
    "dampening": 0.4, "step": 3, "nesterov": True, "maximize": False,
}  # fmt: skip


def scalars_for(rule: Rule, step: int = 3, **changes: float) -> dict[str, float]:
    """The rule's hyperparameters in ``step``, with ``changes``; those of one optimizer alone are as in its entry."""
    of_cases: dict[str, Any] = {}
    for case in (case for case in CASES.values() if case.rule == rule.name.removesuffix("_out")):
        of_cases |= case.options | {f"beta{i}": beta for i, beta in enumerate(case.options.get("betas", ()), 1)}
    own = dict.fromkeys(rule.carried, 0.5)
    known = {**_OF_LISTS, **of_cases, **_OF_STEPS, **own, "step": step}
    return {**{name: float(known.get(name, rule.defaults.get(name))) for name in rule.scalars}, **changes}  # type: ignore[arg-type]


def values_for(name: str, moment: Moment | None, numel: int, generator: torch.Generator) -> torch.Tensor:
    """float64 values fit for the input ``name``: roots and what is not signed are positive, divisors not near zero."""
    value = torch.randn(numel, dtype=F64, generator=generator)
    if name == "self_root" or (moment is not None and not moment.signed):
        return value.square() + 0.3
    if name == "grad_avg":  # its square is less than that mean of squares
        return value.sin() / 2
    if name in ("tensor2", "param", "weight"):
        return value.sign() * (value.abs() + 0.25)
    return value


#: Elements after each of them.
AFTER = 24


def lists_for(
    rule: Rule, sizes: Sequence[int], dtypes: Sequence[torch.dtype], seed: int = 0, gap: int | Sequence[int] = 0
) -> Lists:
    """One list of tensors per input.  ``gap`` elements in front (one number, or one per list) make views that are
    aligned to an element only; :data:`AFTER` elements follow, of 7."""
    generator = torch.Generator().manual_seed(seed)
    lists: Lists = []
    gaps = [gap] * len(dtypes) if isinstance(gap, int) else gap
    for name, dtype, gap in zip(rule.inputs, dtypes, gaps, strict=True):
        name = "self_root" if rule.name.startswith("square_root") else name
        lists.append(
            [_view(values_for(name, rule.moments.get(name), size, generator).to(dtype), gap) for size in sizes]
        )
    if "lion" in rule.name:
        for grad, exp_avg in zip(*lists[1:3], strict=True):
            _off_the_edge(grad, exp_avg)
    return lists


def _off_the_edge(grad: Any, exp_avg: Any) -> None:
    """Lion's update has a sign that no rounding turns."""
    near = (BETAS[0] * exp_avg.double() + (1 - BETAS[0]) * grad.double()).abs() < 0.01
    exp_avg[near] += 0.5


def _view(value: torch.Tensor, gap: int) -> torch.Tensor:
    room = torch.full((gap + len(value) + AFTER,), 7.0, dtype=value.dtype)
    aligned = room[gap:].data_ptr() % 16 == (gap * value.element_size()) % 16
    assert aligned, "torch.full no longer aligns to 16 bytes"
    return room[gap : gap + len(value)].copy_(value)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch's in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype of torch's in a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def clone(lists: Lists) -> Lists:
    """Copies, absent tensors kept absent."""
    return [[None if t is None else t.clone() for t in tensors] for tensors in lists]


def same_bits(one: Lists, other: Lists) -> bool:
    """Bit for bit, wherever they are; absent where the others are."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(a is b if a is None or b is None else torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


BAND = 16  # elements of 7 behind every view of ``on``


def on(device: str, lists: Lists, gap: int = 0) -> Lists:
    """The same values on ``device``, as views ``gap`` elements into memory of their own, with 7 around them."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        room = torch.full((gap + t.numel() + BAND,), 7.0, dtype=t.dtype, device=device)
        return room[gap : gap + t.numel()].copy_(t.flatten())

    return [[None if t is None else moved(t) for t in tensors] for tensors in lists]


def expected(rule: Rule, lists: Lists, scalars: Sequence[Mapping[str, float]], sets: Sequence[int]) -> Lists:
    """What every written list should hold, in float64; None for rows with an absent tensor, which stay as they are."""
    out: Lists = [[None] * len(lists[j]) for j in rule.writes]
    for i in range(len(lists[0])):
        row = [tensors[i] for tensors in lists]
        if any(t is None for t in row):
            continue
        results = rule.reference(*[t.double().cpu() for t in row if t is not None], **scalars[sets[i]])
        for column, result in zip(out, results, strict=True):
            column[i] = result
    return out


def assert_updated(
    rule: Rule, before: Lists, after: Lists, *scalars: Mapping[str, float], sets: Sequence[int] = ()
) -> None:
    """Every written list is what the reference makes of ``before``, to one rounding of its dtype and eight of the
    arithmetic.

    The bound itself is held to a fraction of the update, so that a kernel that does nothing cannot pass.

    Args:
        rule: whose reference.
        before: copies of what the kernel was given.
        after: what it left.
        scalars: hyperparameters, of each set.
        sets: for each row the index of its set; if there are none, all rows have the first.
    """
    want = expected(rule, before, scalars, sets or [0] * len(before[0]))
    dtypes = [next(t.dtype for t in tensors if t is not None) for tensors in before]
    eps = torch.finfo(F64 if F64 in dtypes else F32).eps  # arithmetic is in double if any list is
    for j, expect in zip(rule.writes, want, strict=True):
        own = torch.finfo(dtypes[j])
        for i, (old, new, target) in enumerate(zip(before[j], after[j], expect, strict=True)):
            if new is None or target is None or old is None or not new.numel():
                continue
            old, got = old.double().cpu(), new.double().cpu()
            where = f"{rule.name}: tensor {i} of {rule.inputs[j]}"
            finite = torch.isfinite(target) & (target.abs() <= own.max)
            assert torch.equal(got.isnan(), target.isnan()), f"{where}: NaN elsewhere than in the reference"
            size = torch.maximum(target.abs(), old.abs()).clamp(min=0.25)
            # Half a step of the list's own dtype, a little more where a double goes to 16 bits through float.
            bound = target.abs() * own.eps * 0.502 + own.tiny * own.eps + 8 * eps * size
            error = (got - target).abs()[finite]
            worst = (error / bound[finite]).argmax() if len(error) else None
            assert worst is None or error[worst] <= bound[finite][worst], (
                f"{where}: element {int(torch.nonzero(finite)[worst])} is {got[finite][worst]:.17g}, expected "
                f"{target[finite][worst]:.17g}, off by {error[worst]:.3g} where {bound[finite][worst]:.3g} is allowed"
            )
            moved = (target - old).abs()[finite]
            if len(moved) > 100:
                assert (moved > 0).float().mean() > 0.2, f"{where}: hardly anything is updated"
                share = (bound[finite] / moved)[moved > 0].median()
                assert share < 0.15, f"{where}: the tolerance is {share:.2g} of an update and shows nothing"
