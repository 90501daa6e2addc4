"""Training with edits on both sides, and what must come of it."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import STATE_EDITS, STEP_EDITS, Edit, Params, groups_of, listed, parameters, state_edits, steps
from often import MARKS

import pagedopt
from tests.optim.edits_groups import EDITS_OF, FLAGS, GROUP_EDITS
from tests.specs import BY_STATE, SPECS, Case

#: Where the package is.
PACKAGE = Path(pagedopt.__file__).parent
#: State by the index of its parameter and its name.
Tensors = dict[tuple[int, str], torch.Tensor]
#: Torch's exceptions that say what was wrong only by how its code happens to be written: any refusal will do.
INCIDENTAL = (AttributeError, TypeError, AssertionError)
#: Errors that a look-up or a read raises by itself: where torch's does, ours looks up or reads on purpose.
BY_THEMSELVES = (KeyError, NotImplementedError)
PLACEMENTS = ("resident", "spilled", "half")
#: Where torch takes a meta tensor for a moment and updates nothing, without a word; here it is refused.
LENIENT = ("momentum_buffer: other device",)


def edits_for(case: Case) -> dict[str, Edit]:
    """All that is done to an optimizer of this kind."""
    found = {**state_edits(case.names), **GROUP_EDITS}
    if case.has_step:
        found |= {f"step: {name}": edit for name, edit in STEP_EDITS.items()}
    for edits in (edits for name, edits in EDITS_OF.items() if name in case.known):
        found |= edits
    return found


def options(case: Case, placement: str, params: Params) -> dict[str, Any]:
    """How to construct ours; half: part of the large parameter's pages stay."""
    budget = {"resident": None, "spilled": 0, "half": len(case.names) * sum(p.nbytes for p in params) // 2}[placement]
    return {} if budget is None else {"device_budget": budget}


@dataclass
class World:
    """An optimizer and its parameters, those of the edits included."""

    optimizer: Any
    params: Params
    warned: list[str] = field(default_factory=list)
    #: The widest tolerance so far: what narrow state has once rounded stays off, whatever state comes after it.
    bound: float = 0.0

    def attempt(self, count: int, first: int) -> BaseException | None:
        """What steps raise, if anything; collects warnings that name the budget."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                steps(self.optimizer, self.params, count, first)
            except Exception as error:
                return error
            finally:
                self.warned += [str(w.message) for w in caught if "budget" in str(w.message)]
        return None

    def tensors(self) -> Tensors:
        return {
            (i, name): value
            for i, p in enumerate(self.params)
            for name, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def snapshot(self) -> list[torch.Tensor]:
        """Copies of all parameters and of all state that has values."""
        return [t.detach().clone() for t in (*self.params, *self.tensors().values()) if not t.is_meta]


def worlds(case: Case, placement: str, device: str = "cpu", steps: int = 0) -> tuple[World, World]:
    """Ours and torch's after so many steps."""
    made = []
    for theirs in (False, True):
        params = parameters(device)
        how = {} if theirs else options(case, placement, params)
        made.append(World(case.make(theirs, groups_of(params), **how), params))
        assert made[-1].attempt(steps, 0) is None
    return made[0], made[1]


def run(case: Case, placement: str, edits: list[tuple[str, Edit]], device: str = "cpu") -> World:
    """Three steps, an edit, three steps …, on both sides; returns ours."""
    ours, theirs = worlds(case, placement, device, steps=3)
    for number, (name, edit) in enumerate(edits, 1):
        before = ours.tensors()
        for world in (ours, theirs):
            edit(world.optimizer, world.params)
        put = {key: t for key, t in ours.tensors().items() if before.get(key) is not t}
        held = ours.tensors()
        if not same_outcome(ours, theirs, name, 3 * number):
            return ours
        assert_same(ours, theirs)
        assert_kept(ours, theirs, put, held)
        assert_reported(case, ours, placement)
    return ours


def same_outcome(ours: World, theirs: World, name: str, first: int) -> bool:
    """Three steps; returns whether they went well, on both sides."""
    start = ours.snapshot()
    mine, other = ours.attempt(3, first), theirs.attempt(3, first)
    if name in LENIENT:
        other = RuntimeError("refused")
    if name == "capturable" and mine is None and ours.params[0].is_cuda:
        return False  # beyond torch, whose counts would have to lie on the device; as it comes with checkpoints
    if other is None:
        if mine is not None:
            raise AssertionError(f"torch goes on, and ours raises {type(mine).__name__}: {mine}") from mine
        return True
    kinds = (RuntimeError, ValueError, *INCIDENTAL) if isinstance(other, INCIDENTAL) else type(other)
    assert isinstance(mine, kinds), f"torch raises {type(other).__name__}: {other}; ours: {mine!r}"
    assert is_raised(mine) or isinstance(mine, BY_THEMSELVES), f"what ours raises just went wrong there: {mine!r}"
    unchanged = all(torch.equal(a, b) for a, b in zip(start, ours.snapshot(), strict=True))
    assert unchanged, "a refused step changed something"
    return False


def is_raised(error: BaseException) -> bool:
    """Whether the innermost line of the package that an error comes from is a ``raise``."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames if PACKAGE in Path(frame.filename).parents]
    return bool(lines) and lines[-1].startswith("raise ")


def tolerance(world: World) -> float:
    """Largest difference over the largest magnitude of a tensor: torch rounds 16-bit state several times a step."""
    narrow = [torch.finfo(t.dtype).eps for t in world.tensors().values() if t.dtype in (torch.float16, torch.bfloat16)]
    return max(narrow, default=torch.finfo(torch.float32).eps * 8) * 4


def assert_near(got: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
    """Close where torch's are finite, and not finite where they are not (which of both depends on the order)."""
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device), what
    if want.is_meta:
        return
    a, b = got.detach().double(), want.detach().double()
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite), f"{what}: finite elsewhere than in torch"
    a, b = a[finite], b[finite]
    if b.numel():
        scale = max(b.abs().max().item(), 0.1)  # one that has come near zero has the rounding of where it came from
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * scale, msg=lambda m: f"{what}: {m}")


def assert_same(ours: World, theirs: World) -> None:
    """Parameters, all state by name, and what a state dict has."""
    bound = theirs.bound = max(theirs.bound, tolerance(theirs))
    for i, (a, b) in enumerate(zip(ours.params, theirs.params, strict=True)):
        assert_near(a, b, bound, f"parameter {i}")
        mine, other = ours.optimizer.state.get(a, {}), theirs.optimizer.state.get(b, {})
        assert bool(mine) == bool(other), f"state of parameter {i} is {mine}; torch's: {other}"
        assert {n for n, v in mine.items() if v is not None} == {n for n, v in other.items() if v is not None}
        for name, value in other.items():
            if isinstance(value, torch.Tensor):
                assert_near(mine[name], value, bound, f"{name} of parameter {i}")
            else:
                assert type(mine[name]) is type(value)
                assert mine[name] == value, f"{name} of parameter {i}"
    assert _saved(ours) == _saved(theirs)


def _saved(world: World) -> Any:
    """The keys and groups of a state dict, or the exception that it raises."""
    try:
        found = world.optimizer.state_dict()
    except Exception as error:
        return type(error)
    return [key for key, entry in found["state"].items() if entry], [group["params"] for group in found["param_groups"]]


def assert_kept(ours: World, theirs: World, put: Tensors, held: Tensors) -> None:
    """What the user put is what is there; what he holds shows the values of now."""
    now, there = ours.tensors(), theirs.tensors()
    for key, tensor in put.items():
        assert now.get(key) is tensor, f"{key}: the optimizer holds another tensor than the one it was given"
    for key, tensor in held.items():
        if key in there and key in now and (key in put or key[1] != "step") and not tensor.is_meta:
            assert torch.equal(tensor, now[key]) or tensor.isnan().any(), f"{key}: a held tensor shows old values"


def assert_reported(case: Case, ours: World, placement: str) -> None:
    """What is reported is the state that there is, resident up to its alignment, paged up to pages and what is unused.

    Of entries that belong to no group the report may speak or not.
    """
    total = sum(ours.optimizer.memory_report().by_place.values())
    everyone = {id(p) for p in listed(ours.optimizer)}
    least = most = 0
    for p, entry in ours.optimizer.state.items():
        found = [v.nbytes for n, v in entry.items() if n in case.names and isinstance(v, torch.Tensor)]
        least += sum(found) if id(p) in everyone else 0
        most += sum(found) + 64 * len(found)
    if placement != "resident":
        room = sum(p.nbytes for p in ours.params) + (16 << 20 if ours.params[0].is_cuda else 1 << 20)
        most = 2 * most + len(case.names) * room
    assert least <= total <= most


def parametrized() -> Any:
    """(case, edit, placement): edits of tensors resident and spilled; AdamW half and with amsgrad those that may differ
    there.  `make test` does every other one: each edit of AdamW and SGD resident, or spilled; and no more than that of
    what lies in no arena, step counts and flags, and of classes that torch has not, half resident."""
    chosen = [
        pytest.param(name, edit, placement, id=f"{name}-{edit}-{placement}", marks=MARKS[often])
        for name, case in BY_STATE.items()
        for i, edit in enumerate(edits_for(case))
        for j, placement in enumerate(PLACEMENTS)
        if (often := (i + j) % 2 == 0) or not (is_own(case) or edit.startswith("step: ") or edit in FLAGS)
        if not _is_alike(case, edit, placement)
    ]
    return pytest.mark.parametrize(("case", "edit", "placement"), chosen)


def is_own(case: Case) -> bool:
    """Whether torch has no such class: its state is as another's, and half resident as AdamW's."""
    return not case.theirs.__module__.startswith("torch.")


def _is_alike(case: Case, edit: str, placement: str) -> bool:
    """Whether a combination says no more than others do."""
    first = next(spec for spec in SPECS.values() if case in spec.cases).cases[0]
    half = placement == "half"
    if is_own(case):
        return not half
    own = tuple((set(case.names) - set(first.names)) | (set(case.options) - set(first.options)))
    if case is not first and not edit.startswith(own):
        return True
    of_state = edit in STATE_EDITS or edit in GROUP_EDITS or edit.startswith(("large", "amsgrad", *own))
    return half and not (case.has_step and of_state)
