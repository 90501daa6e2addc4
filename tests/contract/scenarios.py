"""The contract: what people do to an optimizer of torch, done to ours and to torch's, and both transcripts compared.

A scenario (``tests/contract``) is a function of a :class:`World`, which makes optimizers of one side and writes down
what is said and raised.  It runs once with torch's class and once with ours in each of the placements; what differs
must be listed, with the reason, in ``tests/contract/differences.py``.  Every optimizer of the registry gets all of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from often import MARKS

from pagedopt.optim.registry import OPTIMIZERS, Entry
from tests.contract.differences import Difference, listed
from tests.specs import spec_of
from tests.world import EPS, give, near, parameter, values

#: Flags by which torch chooses one of its implementations.
FLAGS = ("foreach", "fused", "capturable", "differentiable")

#: What torch does where no flag is set.
DEFAULT: dict[str, dict[str, Any]] = {"cpu": {"foreach": False}, "cuda": {"foreach": True}}

Shapes = Iterable[Iterable[int]]
SHAPES: Shapes = ((200, 101), (13, 18), (1,), ())


@functools.cache
def capturing(entry: Entry) -> Any:
    """A class of optimizers whose every step is captured into a graph of its own, and replayed; state is made with it,
    as a first step cannot make it in a capture."""

    class Captured(entry.optimizer):  # type: ignore[misc, name-defined]
        def __init__(self, params: Any, **hyper: Any) -> None:
            super().__init__(params, **hyper, **spec_of(entry).capturable, preallocate=True)
            self.side = torch.cuda.Stream()

        def step(self, closure: Any = None) -> None:
            graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                graph.capture_begin()  # torch.cuda.graph collects all garbage each time
                try:
                    super().step()
                finally:  # else nothing else in this process could be captured, or wait
                    graph.capture_end()
                graph.replay()
            here.wait_stream(self.side)

    return Captured


@dataclass(frozen=True)
class Place:
    """Where state lives: a device, and options of ours."""

    name: str
    device: str
    options: dict[str, Any]
    captured: bool = False  # whether each step is captured into a CUDA graph and replayed

    def kind(self, entry: Entry) -> Any:
        """Our class there."""
        return capturing(entry) if self.captured else entry.optimizer


_IN_PLACE = {"placement": "mapped", "device_budget": "50%", "host_access": "in_place"}
PLACES = (
    Place("resident", "cpu", {}),
    Place("file", "cpu", {"placement": "file", "device_budget": "50%"}),
    Place("resident", "cuda", {}),
    Place("staged", "cuda", {"placement": "mapped", "device_budget": "50%", "host_access": "staged"}),
    Place("in place", "cuda", _IN_PLACE),
)
#: Where numbers are compared, too.
CAPTURED = (
    Place("captured", "cuda", {}, captured=True),
    Place("captured, in place", "cuda", _IN_PLACE, captured=True),
)


def reference(entry: Entry) -> Any:
    """torch's class, as installed, or what stands in for it."""
    return spec_of(entry).reference


@functools.cache
def has(entry: Entry, device: str, **flags: Any) -> bool:
    """Whether torch's class takes a step with these flags on a device; older versions have no fused one of some."""
    p = torch.nn.Parameter(torch.ones(1, device=device))
    p.grad = torch.ones_like(p)
    try:
        reference(entry)([p], **flags).step()
    except (TypeError, RuntimeError):
        return False
    return entry.torch is not None


def ordinary(entry: Entry) -> dict[str, Any]:
    """Hyperparameters of a class, none at its default and none zero."""
    return spec_of(entry).hyper


def without_state(entry: Entry) -> dict[str, Any]:
    """Hyperparameters with which a class keeps no state; empty if there are none."""
    return next((case.options for case in spec_of(entry).cases if not case.names), {})


@dataclass
class World:
    """One side, and what has been said and raised on it.

    Attributes:
        entry: the optimizer.
        device: of parameters that are not asked for elsewhere.
        options: of ours; None: this is torch's side.
        said: by label, in order: the type of an error, or values.
    """

    entry: Entry
    device: str
    options: dict[str, Any] | None
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.options is not None

    @property
    def kind(self) -> Any:
        """The optimizer's class on this side."""
        return self.entry.optimizer if self.ours else reference(self.entry)

    @property
    def known(self) -> set[str]:
        """What torch's class takes by name."""
        return set(inspect.signature(reference(self.entry)).parameters)

    def betas(self, *given: Any) -> tuple[Any, ...]:
        """As many as the class takes: the last one again and again."""
        return (*given, *given[-1:] * (len(ordinary(self.entry)["betas"]) - len(given)))

    def make(self, params: Any, **hyper: Any) -> Any:
        """An optimizer with :func:`ordinary` values where ``hyper`` says nothing; torch's is its loop, unless a flag is
        given (``foreach=False`` is what behaviour is compared with)."""
        if self.options is not None:
            return self.kind(params, **{**ordinary(self.entry), **hyper, **self.options})
        if not any(hyper.get(flag) for flag in FLAGS):
            hyper = {"foreach": False, **hyper}
        return self.kind(params, **{**ordinary(self.entry), **hyper})

    def make_default(self, params: Any, **hyper: Any) -> Any:
        """The same where infinities and NaN count, which tell in which order kernels compute: torch's is its default
        on this device."""
        more = {} if self.ours or self.entry.torch is None else DEFAULT[self.device]
        return self.kind(params, **{**ordinary(self.entry), **more, **hyper, **(self.options or {})})

    def param(self, shape: Iterable[int] = (13, 18), seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """A parameter whose values belong to the seed, the same on both sides and every device."""
        return parameter(tuple(shape), seed, self.device, dtype)

    def values(self, shape: Iterable[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values between -1 and 1, none of them 0."""
        return values(tuple(shape), seed, self.device, dtype)

    def params(self, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32) -> list[Any]:
        return [self.param(shape, seed, dtype) for seed, shape in enumerate(shapes)]

    def filled(self, module: Any) -> Any:
        """A module with values of the world's."""
        with torch.no_grad():
            for i, p in enumerate(module.parameters()):
                p.copy_(self.values(p.shape, i))
        return module.to(self.device)

    def train(self, optimizer: Any, params: Iterable[Any], steps: Iterable[int] = range(3), show: str = "") -> None:
        """Steps on fresh gradients; what has come of it is written down under the label ``show``."""
        params = list(params)
        for step in steps:
            give(params, step)
            optimizer.step()
        if show:
            self.show(show, optimizer, params)

    def trained(self, params: Any, steps: int = 3, show: str = "", **hyper: Any) -> Any:
        """An optimizer that has taken its first steps."""
        optimizer = self.make(params, **hyper)
        self.train(optimizer, [p for group in optimizer.param_groups for p in group["params"]], range(steps), show)
        return optimizer

    def begin(self, shapes: Shapes = SHAPES, steps: int = 0, show: str = "", **hyper: Any) -> tuple[Any, Any]:
        """Parameters, and their optimizer after some steps."""
        params = self.params(shapes)
        return params, self.trained(params, steps, show, **hyper)

    def say(self, label: str, value: Any) -> None:
        """Write a value down: a tensor, a number, a text, or lists, tuples and dicts of them."""
        assert label not in self.said, f"{label!r} is said twice"
        self.said[label] = _copy(value)

    def show(self, label: str, optimizer: Any, params: Iterable[Any]) -> None:
        """Write parameters and their state down."""
        self.say(label, [(p, dict(optimizer.state.get(p, {}))) for p in params])

    @contextlib.contextmanager
    def tries(self, label: str) -> Iterator[None]:
        """A block that may raise; the type of the error is written down, and that there was none."""
        assert label not in self.said, f"{label!r} is said twice"
        self.said[label] = "accepted"
        try:
            yield
        except Exception as error:
            self.said[label] = error

    def attempt(self, label: str, act: Callable[..., Any], /, *arguments: Any, **named: Any) -> None:
        """A call that may raise, written down as by :meth:`tries`."""
        with self.tries(label):
            act(*arguments, **named)


Play = Callable[[World], None]


@dataclass(frozen=True)
class Scenario:
    """What people do, in one sentence; ``devices`` are those it makes sense on."""

    chapter: str
    name: str
    sentence: str
    play: Play
    devices: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.chapter}: {self.name}"


SCENARIOS: list[Scenario] = []


def scenario(chapter: str, *devices: str) -> Callable[[Play], Callable[[Entry, Place], None]]:
    """Make a test of a scenario, whose docstring is its sentence; left out, ``devices`` are all.

    What differs from torch has to be listed in ``tests/contract/differences.py``.
    """

    def enter(play: Play) -> Callable[[Entry, Place], None]:
        sentence = " ".join((play.__doc__ or "").split())
        name = play.__name__.removeprefix("test_").replace("_", " ")
        assert sentence, f"{name} has no sentence"
        assert name not in {scene.name for scene in SCENARIOS}, f"{name} is there, and differences are listed by name"
        scene = Scenario(chapter, name, sentence, play, devices or ("cpu", "cuda"))
        SCENARIOS.append(scene)

        def test(entry: Entry, place: Place) -> None:
            hold(scene, entry, place)

        test.__name__, test.__doc__ = play.__name__, play.__doc__
        return pytest.mark.parametrize(("entry", "place"), _cases(scene))(test)

    return enter


def _cases(scene: Scenario) -> list[Any]:
    """On a CPU every optimizer goes through every scenario in one of the two places, and every scenario is done in
    both; `make test-long` does all of them in both."""
    at = len([other for other in SCENARIOS if other.play.__module__ == scene.play.__module__])
    return [
        pytest.param(
            entry, place, id=f"{entry.name}-{place.device}-{place.name}",
            marks=NEEDED if place.device == "cuda" else MARKS[is_often(at, j, k)],
        )
        for j, entry in enumerate(OPTIMIZERS)
        for k, place in enumerate(PLACES)
        if place.device in scene.devices
    ]  # fmt: skip


def is_often(*numbers: int) -> bool:
    """Whether a case on a CPU is no long one, given where each of its values stands in its list: every other one is."""
    return sum(numbers) % 2 == 0


def hold(scene: Scenario, entry: Entry, place: Place) -> None:
    """What is done does what it does in torch, but for the differences that are listed."""
    theirs, ours = run(scene, entry, place)
    found = differences(theirs, ours)
    assert theirs.said, "nothing is compared"

    def entered(label: str) -> Difference | None:
        """What is listed; a difference from older versions counts where the installed torch raises there, or before."""
        each = listed(scene.name, label, entry.name, place.device)
        taken = label in theirs.said and not isinstance(theirs.said[label], Exception)
        return None if each is not None and each.older and taken else each

    unlisted = {at: words for at, words in found.items() if not entered(at)}
    assert not unlisted, f"{scene.sentence} {unlisted}"
    for label in theirs.said:
        known = entered(label)
        assert known is None or label in found, f"{label!r} is listed as a difference, and is none: {known}"
        if known is not None and known.error is not None:
            assert isinstance(ours.said[label], known.error), f"{label!r}: {ours.said[label]!r}"


def run(scene: Scenario, entry: Entry, place: Place) -> tuple[World, World]:
    """Both sides, torch's first, after the scenario."""
    return _played(scene, entry, place.device), _play(scene, World(entry, place.device, dict(place.options)))


@functools.lru_cache(maxsize=2)  # the placements of one scenario follow each other
def _played(scene: Scenario, entry: Entry, device: str) -> World:
    return _play(scene, World(entry, device, None))


def _play(scene: Scenario, world: World) -> World:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scene.play(world)
    return world


def differences(theirs: World, ours: World) -> dict[str, str]:
    """By label, how the transcripts differ, in words; empty if they do not."""
    found = {}
    for label in (*theirs.said, *(new for new in ours.said if new not in theirs.said)):
        if (words := _differ(theirs.said.get(label, "not reached"), ours.said.get(label, "not reached"))) is not None:
            found[label] = words
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.preserve_format)
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_copy(each) for each in value])
    return value


def _differ(want: Any, got: Any) -> str | None:
    """How two values differ; None if they do not."""
    if isinstance(want, Exception) or isinstance(got, Exception):
        alike = isinstance(want, Exception) and isinstance(got, type(want))
        return None if alike else f"torch: {_error(want)}; ours: {_error(got)}"
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        return _differ_tensor(want, got)
    if isinstance(want, dict) and isinstance(got, dict):
        if want.keys() != got.keys():
            return f"torch has {list(want)}, ours {list(got)}"
        return next((f"{k}: {d}" for k in want if (d := _differ(want[k], got[k])) is not None), None)
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        if len(want) != len(got):
            return f"torch has {len(want)}, ours {len(got)}"
        pairs = enumerate(zip(want, got, strict=True))
        return next((f"[{i}] {d}" for i, (w, g) in pairs if (d := _differ(w, g)) is not None), None)
    same = type(want) is type(got) and (want == got or want != want)
    return None if same else f"torch: {want!r}, ours: {got!r}"


def _error(value: Any) -> str:
    name = type(value).__name__
    return f"{name} ({str(value).splitlines()[0][:160]})" if isinstance(value, Exception) else "no error"


def _differ_tensor(want: torch.Tensor, got: torch.Tensor) -> str | None:
    try:
        near(got, want, EPS.get(want.dtype.to_real(), 0.0), "values", strides=True)
    except AssertionError as error:
        return f"torch and ours: {error}"
    if want.is_complex():
        want, got = torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj())
    x, y = (t.masked_fill(t.isfinite(), 0) for t in (want, got))
    return None if torch.allclose(x, y, equal_nan=True) else "NaN or infinity elsewhere, or of another sign"


# --- hyperparameters that scenarios try -------------------------------------------------------------------------------


def switches(world: World) -> list[str]:
    """Names of hyperparameters that are on or off."""
    return [name for name in ("amsgrad", "nesterov", "maximize") if name in world.known]


def group_of(optimizer: Any, *also: str) -> dict[str, Any]:
    """The first group but for its parameters and, as the world chooses it for torch, ``foreach``."""
    away = {"params", "foreach"} - {*also}
    return {name: value for name, value in optimizer.param_groups[0].items() if name not in away}


def tried(world: World, label: str, **hyper: Any) -> None:
    """Make an optimizer and take two steps."""
    p = world.param((13, 5))
    with world.tries(label):
        opt = world.make([p], **hyper)
        group = group_of(opt, *hyper)
        world.train(opt, [p], range(2))
        world.say(f"{label}: what came of it", [p, group])


def odd_values(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """Values at the edges of what is taken and beyond, by label."""
    one, two = torch.tensor(0.5), torch.tensor([0.5, 0.25])
    here = torch.full((1,), 0.25, device=world.device)
    odd: dict[str, list[Any]] = {
        "lr": [0, 1, True, -1.0, -0.0, math.nan, math.inf, "0.1", None, one, one.double(), one.int(), two, two[:1],
               two[:0], two[:1, None], -one, here, here[0], one.numpy()[()], one.clone().requires_grad_()],
        "weight_decay": [0, -1.0, math.nan, math.inf, None, one],
        "eps": [0, -1.0, math.nan, math.inf, None, one],
        "betas": [(0, 0), (0.0, 0.0), (1.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5, -0.1), (0.5, math.nan), (0.5,), (),
                  (0.5, 0.6, 0.7), [0.5, 0.6], 0.5, None, (one, one), (one, 0.5), (0.5, one), (two, one), (one, two),
                  (two[:1], one), (here, here[0]), (one, -one), (one.double(), one.double()), (0, 0.5), (False, False)],
        "momentum": [0, 1, 2.0, -1.0, math.nan, None, one],
        "dampening": [0, 1.0, 2.0, -1.0, None, one],
        "nesterov": [True, 1, None],
        "amsgrad": [True, 1, None],
        "maximize": [True, 1, None],
        "params": [[], [world.param(), 3], [{}], torch.ones(3), None, {world.param()}],
        "unknown": [1],
    }  # fmt: skip
    for name, edges in odd.items():
        for value in edges if name in {*world.known, "unknown"} else []:
            wide = name == "betas" and isinstance(value, tuple) and len(value) == 2
            yield f"{name}={shown(value)}", {name: world.betas(*value) if wide else value}
    if "nesterov" in world.known:
        yield "nesterov, no dampening", {"nesterov": True, "dampening": 0}
        yield "nesterov, no momentum", {"nesterov": True, "dampening": 0, "momentum": 0}


def shown(value: Any) -> str:
    """A value in a label, the same on both sides."""
    if isinstance(value, torch.Tensor):
        on = "" if value.device.type == "cpu" else " on the device"
        grad = ", with grad" if value.requires_grad else ""
        return f"{value.dtype} {value.tolist()}{on}{grad}"
    if isinstance(value, list | tuple | set):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    return repr(value)
