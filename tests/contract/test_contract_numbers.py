"""The contract: numbers, measured in three ways, in each place and in captured steps.

* Over 1,000 steps in float32 the error against float64 is at most that of the best of torch's ways on that device: its
  loop, ``foreach`` and ``fused``.
* One step from torch's own parameters and state differs from a step of torch's default by a few roundings.
* In 16 bits such a step ends at most one rounding away from what float64 makes of it.

torch's default is its loop on a CPU, and ``foreach`` on a GPU.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from often import MARKS

from pagedopt.optim.registry import OPTIMIZERS, Entry
from tests.contract.scenarios import CAPTURED, DEFAULT, PLACES, Place, has, is_often, ordinary, reference
from tests.specs import spec_of
from tests.world import numbers

Shapes = tuple[tuple[int, ...], ...]
#: With tails for every vector width, one element, none.
SHAPES: Shapes = ((4097,), (64, 33), (), (0,), (2, 4096))
#: In the tails of its vectors torch's fused kernel on a CPU rounds otherwise than in them: long runs have no tails.
LONG_SHAPES: Shapes = ((64, 192), (0,))
LONG = 1000
#: Steps of torch's behind which one step of either is compared (in 16 bits without the last).
STARTS = (0, 10, LONG)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Bound on the root mean square of the error over :data:`LONG` steps, as a multiple of torch's best.
RMS = 1.02
#: Gradients repeat after as many steps.
PERIOD = 97


def variants(entry: Entry) -> list[dict[str, Any]]:
    """Hyperparameters: nothing at its default; all of it; and what else the constructor can be given."""
    first, *others = (case.options for case in spec_of(entry).cases if not case.in_groups)
    return [first, {}, *others]


def _hyper(entry: Entry, at: int, dtype: torch.dtype) -> dict[str, Any]:
    """A variant; torch's loop rounds an eps of 1e-8 to 0 in float16, and parameters become infinite."""
    found = variants(entry)[at]
    return found if dtype is not torch.float16 or "eps" not in ordinary(entry) else {"eps": 1e-4, **found}


def ways(entry: Entry, device: str) -> dict[str, dict[str, Any]]:
    """The flags of those of torch's ways that it has for this class on this device, by name."""
    return {way: flags for way, flags in WAYS.items() if way == "loop" or has(entry, device, **flags)}


WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
#: Parameters and each kind of state, all elements of a kind behind each other.
Kinds = dict[str, torch.Tensor]
#: Parameters, a state dict, and how many steps were taken.
Stand = tuple[list[torch.Tensor], dict[str, Any], int]


@functools.lru_cache(maxsize=2 * PERIOD)
def _gradients(shapes: Shapes, at: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    scale = 5.0 if at % 7 == 0 else 1.0
    return [(numbers(s, 31 * at + 7 * i + 1, device) * scale).to(dtype) for i, s in enumerate(shapes)]


class Training:
    """An optimizer over parameters of integer arithmetic; ``wide``: over the same values in float64."""

    def __init__(
        self, kind: Any, hyper: dict[str, Any], dtype: torch.dtype, device: str, shapes: Shapes, wide: bool = False
    ) -> None:
        self.shapes, self.dtype, self.device, self.taken = shapes, dtype, device, 0
        as_is = torch.float64 if wide else dtype
        values = [numbers(s, 900 + i, device).to(dtype).to(as_is) for i, s in enumerate(shapes)]
        self.params = [torch.nn.Parameter(value) for value in values]
        self.optimizer = kind(self.params, **hyper)

    def to_step(self, last: int) -> Training:
        """Take steps until ``last`` have been taken."""
        while self.taken < last:
            self.taken += 1
            grads = _gradients(self.shapes, self.taken % PERIOD, self.dtype, self.device)
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad.to(p.dtype)
            self.optimizer.step()
        return self

    def stand(self) -> Stand:
        """What another one can go on from."""
        return [p.detach().clone() for p in self.params], copy.deepcopy(self.optimizer.state_dict()), self.taken

    def at(self, stand: Stand) -> Training:
        """Go where another one stood."""
        values, saved, self.taken = stand
        for p, value in zip(self.params, values, strict=True):
            p.data.copy_(value)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": copy.deepcopy(saved["state"]), "param_groups": groups})
        return self

    def kinds(self) -> Kinds:
        """Parameters and state; the counts of steps, which scenarios compare, are left out."""
        found: dict[str, list[torch.Tensor]] = {"parameter": [p.detach() for p in self.params]}
        for p in self.params:
            for name, value in self.optimizer.state[p].items():
                if isinstance(value, torch.Tensor) and name != "step":
                    found.setdefault(name, []).append(value)
        return {name: torch.cat([t.cpu().flatten() for t in each]) for name, each in found.items()}


@functools.lru_cache(maxsize=1)
def _torchs_errors(entry: Entry, at: int, device: str) -> tuple[Kinds, dict[str, tuple[float, ...]]]:
    """The exact numbers after :data:`LONG` steps, and by kind the least rms and largest error of torch's ways."""
    hyper, kind = variants(entry)[at], reference(entry)
    exact = (
        Training(kind, {**hyper, "foreach": False}, torch.float32, device, LONG_SHAPES, wide=True).to_step(LONG).kinds()
    )
    errors: dict[str, list[tuple[float, ...]]] = {}
    for way, flags in ways(entry, device).items():
        run = Training(kind, {**hyper, **flags}, torch.float32, device, LONG_SHAPES).to_step(LONG).kinds()
        for name, value in run.items():
            if (device, way, name) not in spec_of(entry).unmeasured:
                errors.setdefault(name, []).append(_error(value, exact[name]))
    return exact, {name: (min(rms for rms, _ in each), min(most for _, most in each)) for name, each in errors.items()}


def _error(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, ...]:
    """The root mean square and the largest error."""
    far = found.double() - exact
    return float(far.square().mean().sqrt()), float(far.abs().max())


def far_from_exact(entry: Entry, at: int, place: Place) -> list[str]:
    """Kinds whose error over :data:`LONG` steps is too large, in words."""
    hyper = {**variants(entry)[at], **place.options}
    mine = Training(place.kind(entry), hyper, torch.float32, place.device, LONG_SHAPES).to_step(LONG).kinds()
    exact, least = _torchs_errors(entry, at, place.device)
    assert mine.keys() == exact.keys()
    found = []
    bounds = RMS, spec_of(entry).most
    for name, value in mine.items():
        errors = zip(("rms", "largest"), _error(value, exact[name]), least[name], bounds, strict=True)
        for what, error, best, bound in errors:
            if not error <= bound * best:
                found.append(f"{name}: {what} error {error:.3g}, the least of torch's ways {best:.3g}")
    return found


@functools.lru_cache(maxsize=1)
def _starts(entry: Entry, at: int, dtype: torch.dtype, device: str) -> list[tuple[Stand, Kinds, Kinds]]:
    """Where torch's default stands after some steps; what its next step leaves there, and one in float64."""
    hyper, kind, found = _hyper(entry, at, dtype), reference(entry), []
    default = Training(kind, {**hyper, **DEFAULT[device]}, dtype, device, SHAPES)
    for start in STARTS if dtype.itemsize > 2 else STARTS[:-1]:
        stand = default.to_step(start).stand()
        exact = (
            Training(kind, {**hyper, "foreach": False}, dtype, device, SHAPES, wide=True)
            .at(stand)
            .to_step(start + 1)
            .kinds()
        )
        found.append((stand, default.to_step(start + 1).kinds(), exact))
    return found


def far_from_default(entry: Entry, at: int, dtype: torch.dtype, place: Place) -> list[str]:
    """What one step leaves too far from what torch's default does, in words; in 16 bits from the exact numbers."""
    hyper, found = {**_hyper(entry, at, dtype), **place.options}, []
    for stand, theirs, exact in _starts(entry, at, dtype, place.device):
        training = Training(place.kind(entry), hyper, dtype, place.device, SHAPES)
        before = training.at(stand).kinds()
        mine = training.to_step(stand[2] + 1).kinds()
        assert mine.keys() == theirs.keys() == exact.keys()
        for name, value in mine.items():
            old = before.get(name, torch.zeros_like(value)).double()
            if dtype.itemsize == 2:  # a rounding, and those of arithmetic in float32
                wide = exact[name] if entry.torch else theirs[name].double()  # Lion's loop computes in float32
                want = wide.to(dtype)
                bound = ulp(want, dtype) + 5 * ulp(_size(wide, old), torch.float32)
            else:
                want = theirs[name]
                bound = spec_of(entry).ulp[place.device].get(name, 0) * ulp(
                    _size(want, old) if name == "parameter" else want, dtype
                )
            same = (value == want) | (value.isnan() & want.isnan())
            wrong = ~same & ~((value.double() - want.double()).abs() <= bound)
            if wrong.any():
                first = int(wrong.nonzero()[0, 0])
                found.append(f"{name} after {stand[2]} steps: {int(wrong.sum())} of {len(wrong)} elements, "
                    f"the first {float(value[first])!r} where {float(want[first])!r} is expected")  # fmt: skip
    return found


def _size(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The larger of a number and its change."""
    return torch.maximum(new.double().abs(), (new.double() - old).abs())


def ulp(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance from ``size`` to the next larger number of ``dtype``, in float64."""
    here = size.abs().to(dtype)
    return torch.nextafter(here, torch.full_like(here, torch.inf)).double() - here.double()


VARIANTS = [
    (entry, at, device) for entry in OPTIMIZERS for at in range(len(variants(entry))) for device in ("cpu", "cuda")
]
#: On a CPU `make test` takes a thousand steps of the first variant of each class, whose flags single steps show.
THOUSANDS = [
    pytest.param(
        entry, at, device, id=f"{entry.name}-{at}-{device}", marks=NEEDED if device == "cuda" else MARKS[at == 0]
    )
    for entry, at, device in VARIANTS
]
#: On a CPU every variant is often compared in two dtypes, in turn: every class in all of them.
SINGLE = [
    pytest.param(
        entry, at, device, dtype, id=f"{entry.name}-{at}-{device}-{dtype}",
        marks=NEEDED if device == "cuda" else MARKS[is_often(at, i)],
    )
    for entry, at, device in VARIANTS
    for i, dtype in enumerate(DTYPES)
]  # fmt: skip


def places(device: str) -> list[Place]:
    """Where numbers are compared: in captured steps, too."""
    return [place for place in (*PLACES, *CAPTURED) if place.device == device]


@pytest.mark.parametrize(("entry", "at", "device"), THOUSANDS)
def test_a_thousand_steps_end_nearer_to_float64_than_any_of_torchs_ways(entry: Entry, at: int, device: str) -> None:
    wrong = {place.name: far_from_exact(entry, at, place) for place in places(device)}
    assert not any(wrong.values()), f"{variants(entry)[at]}: {wrong}"


@pytest.mark.parametrize(("entry", "at", "device", "dtype"), SINGLE)
def test_a_step_ends_a_few_roundings_from_torchs_default(
    entry: Entry, at: int, device: str, dtype: torch.dtype
) -> None:
    wrong = {place.name: far_from_default(entry, at, dtype, place) for place in places(device)}
    assert not any(wrong.values()), f"{variants(entry)[at]}: {wrong}"
