"""One case on several sides: the same parameters, gradients and acts.  torch decides, and our sides agree to the bit.

An act (``tests/acts.py``) is a function of a :class:`World`.  ``Worlds(case, *SIDES).step(4).do(act).step(4)`` is all
that a test has to say: after every act and its steps each side is near torch's and has the bits of the first of
ours; what torch refuses is refused and changes nothing; what a user put stays; what is reported is there.
"""

from __future__ import annotations

import functools
import math
import os
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import pagedopt
from pagedopt.rules import RULES
from pagedopt.system import look as build
from pagedopt.tables.tensors import same_layout
from tests.specs import Case

Params = list[Parameter]
Tensors = dict[tuple[int, str], torch.Tensor]

#: Whether steps can be quick here: there is a compiler for the look.
QUICK = build.is_wanted() and build.compiled_look(wait=True) is not None
PACKAGE = Path(pagedopt.__file__).parent
STATE_NAMES = {name for rule in RULES.values() for name in rule.inputs[2:]}
#: Torch's exceptions that say what was wrong only by how its code happens to be written: any refusal will do.
INCIDENTAL = (AttributeError, TypeError, AssertionError)
#: Errors that a look-up or a read raises by itself: where torch's does, ours looks up or reads on purpose.
BY_THEMSELVES = (KeyError, NotImplementedError)
#: Where torch takes a meta tensor for a moment and updates nothing, without a word; here it is refused.
LENIENT = ("momentum_buffer: other device",)
#: Counts that only some of torch's classes read; others go on with them.
UNREAD = ("step: two elements", "step: resize_(0)")
#: Where ours on a GPU does what torch refuses, whose counts would have to lie on the device.
BEYOND = ("capturable",)
#: How far from torch's, in parts of the largest magnitude: torch rounds 16-bit state several times a step.
EPS = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 4 * 2**-7, torch.float16: 4 * 2**-10}

# --- parameters and gradients: integer arithmetic, the same on every device -------------------------------------------

#: Behind a first one that spans pages, of 64 KiB in a file and of 2 MiB on a device; two are alike.
SHAPES = ((13, 18), (13, 18), (5, 9), (), (70,))
LARGE = {"cpu": (200, 201), "cuda": (1100, 1101)}


def numbers(shape: tuple[int, ...], seed: int, device: str = "cpu") -> torch.Tensor:
    """Values between -1 and 1, none of them 0."""
    return _numbers(tuple(shape), seed).to(device, copy=True)


# All acts are done to the same parameters and gradients.  They are kept on the host: memory of a device is counted.
@functools.lru_cache(maxsize=128)
def _numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    k = torch.arange(torch.Size(shape).numel(), device="cpu")
    return (((k * 7919 + seed * 104729) % 2003 * 2 - 2003).float() / 2003).reshape(shape)


def values(shape: tuple[int, ...], seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same as numbers of a dtype, complex ones among them."""
    if dtype.is_complex:
        return torch.complex(numbers(shape, seed, device), numbers(shape, seed + 1, device)).to(dtype)
    return numbers(shape, seed, device).to(dtype)


def parameter(shape: tuple[int, ...], seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(values(shape, 900 + seed, device, dtype))


def parameters(device: str = "cpu") -> Params:
    return [parameter(shape, i, device) for i, shape in enumerate((LARGE[device], *SHAPES))]


def groups_of(params: Params) -> list[dict[str, Any]]:
    """Two groups, of which the second has values of its own."""
    return [{"params": params[:4]}, {"params": params[4:], "lr": 0.07, "weight_decay": 0.3}]


def one_group(params: Params) -> list[dict[str, Any]]:
    return [{"params": params}]


def give(params: Iterable[torch.Tensor], step: int = 0, skip: Collection[int] = ()) -> None:
    """Fresh gradients that depend on step and index, laid out as their parameters; None for those in ``skip``."""
    for i, p in enumerate(params):
        grad = torch.empty_like(p, requires_grad=False)
        p.grad = None if i in skip else grad.copy_(values(p.shape, 31 * step + 7 * i + 1, str(p.device), p.dtype))


def steps(optimizer: Optimizer, params: Params, count: int, first: int = 0) -> None:
    """Steps ``first`` …; every gradient is new, and differs from step to step."""
    for step in range(first, first + count):
        give(params, step)
        optimizer.step()


# --- sides ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """Who steps, and where.

    Attributes:
        options: of ours; None: this is torch's class.
        share: of the state's bytes that may be resident; None: there is no budget.
        python: no step is one compiled call.
        dense: parameters are contiguous, whatever they are on other sides.
        device: where parameters are, if not where they are on other sides.
    """

    name: str
    options: Mapping[str, Any] | None = field(default_factory=dict)
    share: float | None = None
    python: bool = False
    dense: bool = False
    device: str | None = None

    @property
    def rounds(self) -> bool:
        """Whether state is rounded further than torch's: there is only the first of our sides to compare it with."""
        return "state_format" in (self.options or {})


TORCH, RESIDENT, PYTHON = Side("torch", None), Side("resident"), Side("python", python=True)
SPILLED, HALF, DENSE = Side("spilled", share=0), Side("half", share=0.5), Side("dense", dense=True)
SIDES = (RESIDENT, PYTHON, SPILLED, HALF)
INT8 = (Side("int8", {"state_format": "int8"}), Side("int8 spilled", {"state_format": "int8"}, share=0, python=True))


def record(optimizer: Any) -> object | None:
    """What lets the steps of an optimizer be one compiled call; None: they look in Python."""
    return optimizer._quick.step


class World:
    """An optimizer on one side and its parameters, those that acts add included.

    Args:
        make: the parameters, for a device; left out: of ``dtypes`` in turn, in the shapes of this file.
        groups: what the optimizer is given of them.
        clip: the norm that gradients are clipped to: by us, or in front of torch's step.
        scale: that of a ``GradScaler``, by which gradients are taken to be multiplied.
        skips: a step is left out if its norm is not finite: by us, or by an ``if`` in front of torch's.
    """

    def __init__(
        self,
        case: Case,
        side: Side,
        device: str = "cpu",
        dtypes: Any = (torch.float32,),
        make: Callable[[str], list[torch.Tensor]] | None = None,
        groups: Callable[[Params], Any] = groups_of,
        clip: float | None = None,
        scale: float | None = None,
        skips: bool = False,
    ) -> None:
        self.case, self.side, self.clip, self.ours = case, side, clip, side.options is not None
        self.skips = skips
        self.scaler = torch.amp.GradScaler(
            device, init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None
        )
        self.scaler.scale(torch.ones((), device=side.device or device))
        #: Steps taken; those of them that were one compiled call.
        self.count = self.quick = 0
        self.norm: torch.Tensor | None = None
        #: What acts keep from being used again; warnings that name the budget.
        self.alive: list[Any] = []
        self.warned: list[str] = []
        #: Whether state may lie in pages, which take more room than it.
        self.paged = side.share is not None or bool(side.options)
        self.held: Tensors = {}
        self.put: Tensors = {}
        shapes = enumerate((LARGE[device], *SHAPES))
        device = side.device or device
        made = make(device) if make else [parameter(s, i, device, dtypes[i % len(dtypes)]) for i, s in shapes]
        self.params = [Parameter(t.detach().contiguous() if side.dense else t.detach()) for t in made]
        options = dict(side.options or {})
        if side.share is not None:
            options["device_budget"] = int(side.share * len(case.names) * sum(p.nbytes for p in self.params))
        if self.ours:
            options |= {} if clip is None else {"max_grad_norm": clip}
            options |= {"skip_nonfinite": True} if skips else {}
            options = options if scale is None else {"fused": True, **options}
        self.options = options
        with self.around():
            self.optimizer = case.make(not self.ours, groups(self.params), **options)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def groups(self) -> Any:
        return self.optimizer.param_groups

    def listed(self) -> Params:
        return [p for group in self.groups for p in group["params"]]

    def moments(self, p: torch.Tensor) -> list[str]:
        """Names of the tensors of state that are no numbers."""
        return [name for name in self.state[p] if name not in ("step", *self.case.ours.initial)]

    def newcomer(self, shape: tuple[int, ...] = (11, 3)) -> Parameter:
        """One parameter more, which is in no group yet."""
        self.params.append(parameter(shape, len(self.params), str(self.params[0].device)))
        return self.params[-1]

    def tensors(self) -> Tensors:
        entries = [(i, self.state.get(p, {})) for i, p in enumerate(self.params)]
        return {(i, n): t for i, entry in entries for n, t in entry.items() if isinstance(t, torch.Tensor)}

    def snapshot(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in (*self.params, *self.tensors().values()) if not t.is_meta]

    def around(self) -> AbstractContextManager[Any]:
        """What all of this side happens in.  Torch's counts follow the default device, where it could not read them."""
        if not self.ours:
            return torch.device("cpu")
        return mock.patch.dict(os.environ, {build.VARIABLE: "python"}) if self.side.python else nullcontext()

    def attempt(self, act: Callable[[], Any]) -> Exception | None:
        """What it raises, if anything; collects warnings that name the budget."""
        with warnings.catch_warnings(record=True) as caught, self.around():
            warnings.simplefilter("always")
            try:
                act()
            except Exception as error:
                return error
            finally:
                self.warned += [str(w.message) for w in caught if "budget" in str(w.message)]
        return None

    def do(self, act: Act) -> Exception | None:
        """An act, and what there is then that was not there before."""
        before = self.tensors()
        error = self.attempt(lambda: act(self))
        if error is not None:
            self.state.clear()
        self.held = self.tensors()
        self.put = {key: t for key, t in self.held.items() if before.get(key) is not t}
        return error

    def step(self, before: Act | None = None) -> Exception | None:
        """A step on fresh gradients, which ``before`` may change."""
        give(self.params, self.count)
        if before is not None:
            before(self)
        known = record(self.optimizer) if self.ours else None
        error = self.attempt(self.take)
        self.quick += known is not None and known is record(self.optimizer)
        self.count += 1
        return error

    def take(self) -> None:
        """A step on the gradients that there are, clipped and scaled."""
        self.norm = None
        if self.clip is not None and not self.ours:
            self.scaler.unscale_(self.optimizer)
            self.norm = torch.nn.utils.clip_grad_norm_({id(p): p for p in self.listed()}.values(), self.clip)
            if self.skips and not self.norm.isfinite():
                return
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.clip is not None and self.ours:
            self.norm = self.optimizer.grad_norm


Act = Callable[[World], Any]


class Worlds:
    """torch's world, and ours.  Where state is rounded further, or torch has no such class, ours are alone.

    Attributes:
        over: a step was refused, or nothing was left to act on.
    """

    def __init__(self, case: Case, *sides: Side, **how: Any) -> None:
        alone = case.theirs is None or all(side.rounds for side in sides)
        self.theirs = None if alone else World(case, TORCH, **how)
        self.ours = [World(case, side, **how) for side in sides]
        self.over, self.name, self.bound = False, "", 0.0
        #: Of each parameter, that of the narrowest dtype which it has had.
        self.bounds: dict[int, float] = defaultdict(float)
        #: Acts of any kind have followed each other: a load may lay state out anew that torch leaves as the user did.
        self.mixed = False

    def each(self) -> list[World]:
        return self.ours if self.theirs is None else [*self.ours, self.theirs]

    def do(self, act: Act, name: str = "", clear: bool = False) -> Self:
        """An act on each side; where nothing is left to act on, state is cleared (``clear``), or this is over."""
        if not self.over:
            raised = [world.do(act) for world in self.each()]
            assert len({type(error) for error in raised}) == 1, f"not all sides raise: {raised}"
            self.name, self.over, self.mixed = name, raised[0] is not None and not clear, clear
        return self

    def step(self, count: int, before: Act | None = None) -> Self:
        """So many steps, and what comes of them is judged; ends where one is refused."""
        for number in range(0 if self.over else count):
            if number == 0 or before is not None:
                starts = [world.snapshot() for world in self.ours]
            errors = [world.step(before) for world in self.each()]
            if number == count - 1 or any(errors):
                self._judge(errors, starts)
                break
        return self

    def _judge(self, errors: list[Exception | None], starts: list[list[torch.Tensor]]) -> None:
        beyond = self.name in BEYOND and self.ours[0].params[0].is_cuda
        wanted = errors[0 if beyond else -1]
        if self.name in LENIENT or (wanted is None and self.name in UNREAD):
            wanted = RuntimeError("refused")
        for world, error, start in zip(self.ours, errors, starts, strict=False):
            if wanted is None and error is not None:
                raise AssertionError(f"torch goes on, and {world.side.name} raises {error!r}") from error
            if wanted is not None:
                assert_refused(world, error, wanted, start)
                assert str(error) == str(errors[0]), world.side.name
        self.over = wanted is not None or beyond
        for world in () if self.over else self.ours:
            assert_same_bits(self.ours[0], world)
            if self.theirs is not None and world.side.device is None:
                self._near(world, self.theirs)
            assert_kept(world)
            assert_reported(world)

    def _near(self, ours: World, theirs: World) -> None:
        """Parameters, all state by name, and what a state dict has, are torch's but for rounding.

        The values are those of the first of ours, to the bit: only its own are compared with torch's.
        """
        values = ours is self.ours[0]
        strides = not ours.side.dense and not self.mixed
        # What state of another dtype than its parameter's has once rounded stays off.
        for (i, name), t in theirs.tensors().items():
            if name != "step" and t.dtype != theirs.params[i].dtype:
                self.bound = max(self.bound, EPS.get(t.dtype, 0.0))
        for i, (a, b) in enumerate(zip(ours.params, theirs.params, strict=True)):
            self.bounds[i] = max(self.bounds[i], EPS[b.dtype.to_real()])
            bound, what = max(self.bound, self.bounds[i]), f"{ours.side.name}: parameter {i}"
            near(a, b, bound, what, strides, values)
            mine, other = ours.state.get(a, {}), theirs.state.get(b, {})
            assert bool(mine) == bool(other), f"{what} has state {mine}; in torch: {other}"
            assert {n for n, v in mine.items() if v is not None} == {n for n, v in other.items() if v is not None}, what
            for name, value in other.items():
                if isinstance(value, torch.Tensor):
                    # Scaled steps count on the device, as torch's fused ones; the loop counts on the host.  Other
                    # numbers torch loads to the device, whose loop then waits for them.
                    counts = theirs.scaler.is_enabled() if name == "step" else name in ours.optimizer.numbers
                    at = value.device if counts else mine[name].device
                    near(mine[name].to(at), value, bound, f"{name} of {what}", strides, values)
                else:
                    assert (type(mine[name]), mine[name]) == (type(value), value), f"{name} of {what}"
        if theirs.norm is not None and ours.norm is not None:
            near(ours.norm, theirs.norm.double(), max(self.bound, 1e-5), f"{ours.side.name}: norm")
        assert saved(ours) == saved(theirs)


def near(
    got: torch.Tensor, want: torch.Tensor, bound: float, what: str, strides: bool = False, values: bool = True
) -> None:
    """Close where torch's are finite, and not finite where they are not (which of both depends on the order)."""
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device), what
    same = not strides or want.numel() < 2 or same_layout(want.shape, want.stride(), got.stride())
    assert same, f"{what}: strides {got.stride()}, in torch {want.stride()}"
    if want.is_meta or not want.numel() or not values:
        return
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (got.detach(), want.detach()))
    a, b = a.double(), b.double()
    # One that has come near zero has the rounding of where it came from.
    largest = b.abs().max().item()
    if math.isfinite(largest) and torch.allclose(a, b, rtol=bound, atol=bound * max(largest, 0.1)):
        return
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite), f"{what}: finite elsewhere than in torch"
    scale = max(b[finite].abs().max().item(), 0.1) if finite.any() else 1.0
    torch.testing.assert_close(a[finite], b[finite], rtol=bound, atol=bound * scale, msg=lambda m: f"{what}: {m}")


def bits(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().cpu().contiguous()
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)  # a single element may have any strides


def assert_same_bits(one: World, other: World) -> None:
    """All that a step changes: parameters, state and step counts; versions, too, where both lie in the same place."""
    alike = (one.side.dense, one.side.device) == (other.side.dense, other.side.device)
    for i, (a, b) in enumerate(zip(one.params, other.params, strict=True)):
        same = a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        assert same, f"{other.side.name} has another parameter {i} than {one.side.name}"
        assert a._version == b._version or not alike, f"{other.side.name}: version of parameter {i}"
    mine, others = one.tensors(), other.tensors()
    assert mine.keys() == others.keys()
    for key, t in mine.items():
        same = t.is_meta or (t.dtype == others[key].dtype and torch.equal(bits(t), bits(others[key])))
        assert same, f"{other.side.name} has another {key[1]} of parameter {key[0]} than {one.side.name}"
        if alike and (one.side.share, one.side.options) == (other.side.share, other.side.options) and not t.is_meta:
            assert t._version == others[key]._version, f"{other.side.name}: version of {key}"
    if one.norm is not None and other.norm is not None:
        assert torch.equal(bits(one.norm), bits(other.norm)), f"{other.side.name}: norm"


def is_raised(error: BaseException) -> bool:
    """Whether the innermost line of the package that an error comes from is a ``raise``."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames if PACKAGE in Path(frame.filename).parents]
    return bool(lines) and lines[-1].startswith("raise ")


def assert_refused(world: World, error: Exception | None, theirs: Exception, start: list[torch.Tensor]) -> None:
    """As torch refuses, on purpose, and nothing has changed."""
    kinds = (RuntimeError, ValueError, *INCIDENTAL) if isinstance(theirs, INCIDENTAL) else type(theirs)
    assert isinstance(error, kinds), f"torch raises {theirs!r}; {world.side.name}: {error!r}"
    assert is_raised(error) or isinstance(error, BY_THEMSELVES), f"it just went wrong there: {error!r}"
    same = all(torch.equal(bits(a), bits(b)) for a, b in zip(start, world.snapshot(), strict=True))
    assert same, f"{world.side.name}: a refused step changed something"


def assert_kept(ours: World) -> None:
    """What the user put is what is there; what he holds shows the values of now."""
    now = ours.tensors()
    for key, tensor in ours.put.items():
        assert now.get(key) is tensor, f"{key}: the optimizer holds another tensor than the one it was given"
    for key, tensor in ours.held.items():
        if key in now and (key in ours.put or key[1] != "step") and not tensor.is_meta:
            assert torch.equal(tensor, now[key]) or tensor.isnan().any(), f"{key}: held, and shows old values"


def saved(world: World) -> Any:
    """The keys and groups of a state dict, or the type of what it raises."""
    try:
        found = world.optimizer.state_dict()
    except Exception as error:
        return type(error)
    return [key for key, entry in found["state"].items() if entry], [group["params"] for group in found["param_groups"]]


def assert_reported(world: World) -> None:
    """What is reported is the state that there is: resident up to its alignment, paged up to pages and what is unused.

    Of entries that belong to no group the report may speak or not.
    """
    total = sum(world.optimizer.memory_report().by_place.values())
    everyone, least, most = {id(p) for p in world.listed()}, 0, 0
    names = {*STATE_NAMES, *world.case.names}
    for p, entry in world.state.items():
        found = {n: v.nbytes for n, v in entry.items() if n in names and isinstance(v, torch.Tensor)}
        if id(p) in everyone and not world.side.rounds:
            least += sum(found.get(name, 0) for name in world.case.names)
        most += sum(found.values()) + 64 * len(found)
    if world.paged:
        room = sum(p.nbytes for p in world.params) + (16 << 20 if world.params[0].is_cuda else 1 << 20)
        most = 2 * most + len(world.case.names) * room
    assert least <= total <= most, f"{world.side.name}: {total} bytes, not {least} to {most}"
