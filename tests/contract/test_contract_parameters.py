"""The contract: parameters, whatever their sizes, layouts and dtypes, and what is done to them between steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.contract.scenarios import World, scenario, without_state
from tests.world import give

CHAPTER = "parameters"


def net(world: World) -> torch.nn.Module:
    """A small module."""
    return world.filled(torch.nn.Sequential(torch.nn.Linear(13, 18), torch.nn.LayerNorm(18), torch.nn.Linear(18, 1)))


def everything(optimizer: Any, params: Iterable[Any]) -> list[Any]:
    """Parameters, and the tensors of their state."""
    return [*params, *(v for p in params for v in optimizer.state.get(p, {}).values() if v is not None)]


def rounded(values: Any, kind: str) -> list[torch.Tensor]:
    """Tensors as the narrower of float32 and of what they were cast to: all that two orders of rounding agree in."""
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(kind, torch.float32)
    return [t.detach().to(dtype) for t in values]


# --- what they are ----------------------------------------------------------------------------------------------------


@scenario(CHAPTER)
def test_thousands_of_tiny_tensors(world: World) -> None:
    """5,000 parameters of a few elements each."""
    params = [torch.nn.Parameter(v[: 1 + i % 4].clone()) for i, v in enumerate(world.values((5_000, 4), 1))]
    opt = world.make(params)
    for step in range(2):
        for i, (p, g) in enumerate(zip(params, world.values((5_000, 4), 2 + step).unbind(), strict=True)):
            p.grad = g[: 1 + i % 4]
        opt.step()
    world.say("parameters", torch.cat([p.detach() for p in params]))
    names = list(opt.state[params[0]])
    world.say("names", [list(opt.state[p]) == names for p in params])
    for name in names:
        world.say(f"state {name}", torch.cat([opt.state[p][name].flatten() for p in params]))


@scenario(CHAPTER, "cuda")
def test_two_devices(world: World) -> None:
    """Parameters on the CPU and on a GPU in one optimizer, while another GPU is the current device, if there is one."""
    here = world.params([(40, 30)] * 3)
    there = [torch.nn.Parameter(world.values((40, 30), i).cpu()) for i in range(3)]
    params = [p for pair in zip(here, there, strict=True) for p in pair]
    opt = world.make(params)
    with torch.cuda.device(torch.cuda.device_count() - 1):
        world.train(opt, params)
        world.say("current device", torch.cuda.current_device())
    world.show("trained", opt, params)
    world.say("devices", [str(v.device) for p in params for v in opt.state[p].values()])


@scenario(CHAPTER)
def test_numbers_that_cannot_be_trained(world: World) -> None:
    """Integers and float8 with a gradient: refused in the step."""
    for dtype in (torch.int64, torch.float8_e4m3fn):
        p = torch.nn.Parameter(torch.ones(5, device=world.device).to(dtype), requires_grad=False)
        p.grad = torch.ones(5, device=world.device).to(dtype)
        opt = world.make([p])
        world.attempt(f"{dtype}", opt.step)


# --- what is done to them between steps -------------------------------------------------------------------------------


def _set(p: Any, data: torch.Tensor) -> None:
    p.data = data


def _storage(p: Any, data: torch.Tensor) -> None:
    with torch.no_grad():
        p.set_(data)


#: Of a parameter of shape (13, 18).
CHANGES: dict[str, Callable[[Any], None]] = {
    "moved": lambda p: _set(p, p.data.clone()),
    "moved into a larger one": lambda p: _set(p, torch.cat([p.data, p.data])[13:]),
    "moved off its alignment": lambda p: _set(p, torch.cat([p.data.flatten()[:1], p.data.flatten()])[1:].view(p.shape)),
    "set_ to other memory": lambda p: _storage(p, p.data.clone()),
    "set_ to other strides": lambda p: _storage(p, p.data.t().contiguous().t()),
    "other strides": lambda p: _set(p, p.data.t().contiguous().t()),
    "with gaps": lambda p: _set(p, torch.stack([p.data, p.data], -1)[..., 1]),
    "transposed": lambda p: _set(p, p.data.t()),
    "flat": lambda p: _set(p, p.data.flatten()),
    "one more dimension": lambda p: _set(p, p.data[None]),
    "expanded": lambda p: _set(p, p.data[:1].expand(13, 18)),
    "grown": lambda p: _set(p, torch.cat([p.data, p.data])),
    "grown by far": lambda p: _set(p, p.data.repeat(40, 40)),
    "shrunk": lambda p: _set(p, p.data[:5].clone()),
    "a slice of itself": lambda p: _set(p, p.data[:5]),
    "to one element": lambda p: _set(p, p.data[:1, :1].clone()),
    "to nothing": lambda p: _set(p, p.data[:0]),
    "more storage behind it": lambda p: p.data.resize_(500, 18),
    "half": lambda p: _set(p, p.data.half()),
    "bfloat16": lambda p: _set(p, p.data.bfloat16()),
    "double": lambda p: _set(p, p.data.double()),
    "double and grown": lambda p: _set(p, torch.cat([p.data, p.data]).double()),
    "zeros": lambda p: _set(p, torch.zeros_like(p.data)),
    "negated": lambda p: _set(p, torch._neg_view(p.data)),
}


#: Changes that are tried with the old gradient left, too.
LEFT = ("moved", "other strides", "grown", "shrunk", "to one element", "to nothing", "half", "bfloat16", "double")


def _changed(world: World, label: str, change: Callable[[Any], None], kept_grad: bool = False, **hyper: Any) -> None:
    """One parameter of three is changed between two steps, and what follows is said; nothing where it is refused."""
    params, opt = world.begin([(13, 18)] * 3, 2, **hyper)
    change(params[1])
    with world.tries(label):
        if kept_grad:
            opt.step()
            opt.step()
        else:
            params[1].grad = None
            world.train(opt, params, range(2, 4))
        found = everything(opt, params)
        world.say(f"{label}: what it has", [(str(t.dtype), tuple(t.shape), t.stride()) for t in found])
        world.say(f"{label}: values", rounded(found, label.partition(",")[0]))
    if kept_grad:
        with world.tries(f"{label}, new gradients"):
            params[1].grad = None
            world.train(opt, params, range(4, 5))


@scenario(CHAPTER)
def test_changed_between_steps(world: World) -> None:
    """A parameter's ``.data`` or storage is replaced, laid out anew, grown, shrunk or cast between two steps;
    also where an optimizer keeps nothing that would have to fit: ``momentum=0``, if there is one."""
    for label, change in CHANGES.items():
        _changed(world, label, change)
        if plain := without_state(world.entry):
            _changed(world, f"{label}, no momentum", change, **plain)


@scenario(CHAPTER)
def test_changed_with_its_gradient_left(world: World) -> None:
    """The same with the old gradient left where it was, and then new ones."""
    for label in LEFT:
        _changed(world, label, CHANGES[label], kept_grad=True)
        if plain := without_state(world.entry):
            _changed(world, f"{label}, no momentum", CHANGES[label], kept_grad=True, **plain)


@scenario(CHAPTER)
def test_another_view_of_the_same_memory(world: World) -> None:
    """``.data`` becomes another view that begins where the old one did, the gradient's strides stay as they were."""
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.t(),
        "every other column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
        "expanded": lambda t: t[:1].expand(t.shape),
    }
    for label, change in views.items():
        params = world.params([(12, 12)] * 3)
        params[1].data = world.values((12, 24), 5)[:, :12].contiguous()
        opt = world.trained(params, 2)
        params[1].data = change(params[1].data)
        with world.tries(label):
            for i, p in enumerate(params):
                p.grad = world.values((12, 12), 40 + i)
            opt.step()
            world.show(f"{label}: after", opt, params)


@scenario(CHAPTER)
def test_complex_between_steps(world: World) -> None:
    """A parameter becomes complex, or its real part, between two steps."""
    plain = without_state(world.entry)
    for label, kind, change in (
        ("complex", torch.float32, lambda t: t.to(torch.complex64)),
        ("its real part", torch.complex64, lambda t: t.real.clone()),
        ("complex128", torch.complex64, lambda t: t.to(torch.complex128)),
        ("conjugated", torch.complex64, lambda t: t.conj()),
    ):
        for left, kept in itertools.product((False, True), (True, False) if plain else (True,)):
            name = f"{label}, the gradient left" if left else label
            name += "" if kept else ", no momentum"
            params = [world.param((13, 18), i, kind) for i in range(2)]
            opt = world.trained(params, 2, **{} if kept else plain)
            params[0].data = change(params[0].data)
            with world.tries(name):
                if not left:
                    params[0].grad = None
                    give(params, 2)
                opt.step()
                world.say(f"{name}: after", [t.detach().to(torch.complex64) for t in params])


@scenario(CHAPTER)
def test_a_module_cast_before_the_first_step(world: World) -> None:
    """``module.half()``, ``.bfloat16()``, ``.double()`` after the optimizer was made: state is made in that dtype."""
    for name in ("half", "bfloat16", "double"):
        module = net(world)
        opt = world.make(module.parameters())
        getattr(module, name)()
        world.train(opt, module.parameters(), range(2), show=name)


@scenario(CHAPTER, "cuda")
def test_moved_to_another_device(world: World) -> None:
    """A parameter's data moves to the CPU or to the GPU, before the first step and between two."""
    for moment, first in (("before", 0), ("between", 2)):
        for where in ("cpu", "cuda"):
            label = f"to {where}, {moment}"
            home = "cpu" if where == "cuda" else "cuda"
            params = [torch.nn.Parameter(world.values((13, 18), i).to(home)) for i in range(3)]
            opt = world.make(params)
            world.train(opt, params, range(first))
            opt.zero_grad()
            for p in params:
                p.data = p.data.to(where)
            world.attempt(label, world.train, opt, params, range(9, 10), show=f"{label}: after")


@scenario(CHAPTER)
def test_a_step_that_is_refused(world: World) -> None:
    """A step that refuses one of its parameters, and what it leaves of the others, of state and of step counts."""
    params, opt = world.begin([(13, 18)] * 3, 2)
    params[1].data, params[1].grad = torch.cat([params[1].data, params[1].data]), None
    give(params, 2)
    what = everything(opt, params)
    before = [t.detach().clone() for t in what]
    world.attempt("the step", opt.step)
    world.say("all is as it was", all(torch.equal(a, b) for a, b in zip(what, before, strict=True)))


@scenario(CHAPTER)
def test_one_memory_for_two(world: World) -> None:
    """Two parameters that are views of one memory, tied by ``.data``."""
    one, other = world.param((13, 18)), world.param((13, 18), 1)
    other.data = one.data
    opt = world.make([one, other])
    world.attempt("steps", world.train, opt, [one, other], show="trained")
