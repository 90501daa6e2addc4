"""The contract: gradients, there or not, of any layout, value and dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.contract.scenarios import World, scenario, without_state
from tests.specs import spec_of
from tests.world import give

CHAPTER = "gradients"

#: How a gradient is laid out that has the values of another.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "with gaps": lambda g: torch.stack([g, g], -1)[..., 1],
    "part of a larger one": lambda g: torch.nn.functional.pad(g, (3, 2, 1, 1))[1:-1, 3:-2],
    "unaligned": lambda g: torch.cat([g.flatten()[:1], g.flatten()])[1:].view(g.shape),
    "expanded": lambda g: g[:1].expand(g.shape),
    "expanded from one": lambda g: g[:1, :1].expand(g.shape),
    "negated": lambda g: torch._neg_view(g),
    "a parameter's own, doubled": lambda g: torch.cat([g, g])[: len(g)],
}

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Numbers at which arithmetic ends.
EXTREMES = (
    math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e38, -1e38, 3.4e38, 1e19, 1e21, 1e-20, 65504.0,
    6e-8, 1.0,
)  # fmt: skip


def plain(optimizer: Any, params: list[Any]) -> list[Any]:
    """Parameters and their state, whatever that's strides."""
    entries = [{k: v if v is None else v.contiguous() for k, v in optimizer.state.get(p, {}).items()} for p in params]
    return list(zip(params, entries, strict=True))


@scenario(CHAPTER)
def test_laid_out_otherwise(world: World) -> None:
    """Gradients with other strides than their parameters, expanded, negated, with gaps; at once or later."""
    strides: list[Any] = []
    for label, change in LAYOUTS.items():
        for first in (0, 2):
            params = [world.param((13, 18), 1), torch.nn.Parameter(world.values((18, 13), 2).t())]
            opt = world.trained(params, first)
            for step in range(first, first + 2):
                for i, p in enumerate(params):
                    p.grad = change(world.values(p.shape, 31 * step + i))
                opt.step()
            world.say(f"{label}, from step {first}", plain(opt, params))
            strides += [v.stride() for p in params for v in opt.state.get(p, {}).values() if v is not None]
    world.say("strides of state", strides)


@scenario(CHAPTER)
def test_of_complex_numbers(world: World) -> None:
    """Complex gradients with other strides than their parameters, and conjugated and negated views."""
    ways = {name: LAYOUTS[name] for name in ("transposed", "with gaps", "negated")}
    for label, change in {**ways, "conjugated": torch.conj}.items():
        p = world.param((13, 18), 1, torch.complex64)
        opt = world.make([p])
        with world.tries(label):
            for step in range(2):
                p.grad = change(world.values(p.shape, 31 * step, torch.complex64))
                opt.step()
            world.say(f"{label}: trained", plain(opt, [p]))


#: Decay rates of running means: none, one whose lerp begins at the other end, a usual one.
DECAYS = (0.0, 0.4, 0.9)


def _extremes(world: World, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(EXTREMES, device=world.device).to(dtype)


def _decaying(world: World, p: Any, decay: float) -> Any:
    """An optimizer with one rate for all it has; its eps is no 0 in float16."""
    hyper = {name: value for name, value in (("momentum", decay), ("eps", 1e-3)) if name in world.known}
    hyper |= {"betas": world.betas(decay or spec_of(world.entry).least_beta, decay)} if "betas" in world.known else {}
    return world.make_default([p], **hyper)


def _say_extremes(world: World, label: str, opt: Any, p: Any, ended: torch.Tensor | None = None) -> None:
    """Write parameter and state down; ``ended``: where a parameter was infinite before, which is written down apart."""
    ended = torch.zeros_like(p, dtype=torch.bool) if ended is None else ended
    found = {"parameter": p.detach(), **{k: v for k, v in opt.state[p].items() if v is not None and v.dim()}}
    if p.dtype.itemsize == 2:  # rounded after every operation there, once here: a few sums are infinite there alone
        found = {name: torch.stack([t.isnan(), t.isposinf(), t.isneginf()]) for name, t in found.items()}
    value = found.pop("parameter")
    world.say(label, [value.masked_fill(ended, 0), found])
    if ended.any():
        world.say(f"infinite parameters, {label}", value.masked_fill(~ended, 0))


@scenario(CHAPTER)
def test_extreme_values(world: World) -> None:
    """Infinities, NaN, denormal and huge numbers in gradients go where torch lets them go, step by step."""
    for dtype, decay in itertools.product(DTYPES, DECAYS):
        p = world.param((len(EXTREMES), 5), 1, dtype)
        opt, ended = _decaying(world, p, decay), torch.zeros_like(p, dtype=torch.bool)
        for step in range(3):
            p.grad = _extremes(world, dtype).roll(step)[:, None].repeat(1, 5)
            opt.step()
            _say_extremes(world, f"{dtype}, {decay}, step {step}", opt, p, ended)
            ended |= p.detach().isinf()


@scenario(CHAPTER)
def test_extreme_parameters(world: World) -> None:
    """The same in parameters and in state."""
    for dtype, decay in itertools.product(DTYPES, DECAYS):
        start = _extremes(world, dtype)[:, None].repeat(1, 5)
        p, ended = torch.nn.Parameter(start.clone()), start.isinf()
        opt = _decaying(world, p, decay)
        for step in range(4):
            p.grad = world.values(p.shape, 31 + step).to(dtype)
            opt.step()
            if step == 0:
                for value in opt.state[p].values():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape:
                        value.copy_(start.abs().roll(3, 0))
            else:
                _say_extremes(world, f"{dtype}, {decay}, step {step}", opt, p, ended)
            ended |= p.detach().isinf()


@scenario(CHAPTER)
def test_sparse(world: World) -> None:
    """Sparse gradients, in the first step and later, and a dense one after them."""
    for first in (0, 2):
        params = [world.param((13, 18), 1), world.param((13, 18), 2)]
        opt = world.trained(params, first)
        give(params, first)
        params[1].grad = params[1].grad.to_sparse()
        world.attempt(f"in step {first}", opt.step)
        params[1].grad = params[1].grad.to_dense()
        world.attempt(f"a dense one after step {first}", opt.step)


@scenario(CHAPTER)
def test_sparse_without_state(world: World) -> None:
    """Sparse gradients for an optimizer that keeps nothing: no momentum and no weight decay, where possible."""
    simple = {**without_state(world.entry), **({"weight_decay": 0} if "weight_decay" in world.known else {})}
    p = world.param((13, 18), 1)
    opt = world.make([p], **simple)
    p.grad = world.values(p.shape, 3).to_sparse()
    world.attempt("a step", opt.step)


def _mixed(world: World, param: torch.dtype, grad: torch.dtype, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """An optimizer and its parameter after two steps with gradients of another dtype; ``dtype``: of all, the same
    values."""
    p = world.param((13, 18), 1, dtype or grad)
    p.grad = torch.empty_like(p, requires_grad=False)
    p.data = world.values(p.shape, 1).to(param).to(dtype or param)  # such a gradient cannot be assigned, but kept
    opt = world.make([p])
    for step in range(2):
        p.grad.copy_(world.values(p.shape, 77 + step).to(grad))
        opt.step()
    return opt, p


@scenario(CHAPTER)
def test_of_another_dtype(world: World) -> None:
    """Gradients of another dtype than their parameters, as in frameworks that store them in float32."""
    pairs = (
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64), (torch.float64, torch.float32),
    )  # fmt: skip
    for param, grad in pairs:
        label = f"{str(grad)[6:]} of {str(param)[6:]}"
        with world.tries(label):
            opt, p = _mixed(world, param, grad)
            world.say(f"{label}: parameter", p)
            world.say(f"{label}: dtypes of state", [str(v.dtype) for v in opt.state[p].values()])
        if world.ours:
            _, exact = _mixed(world, param, grad, torch.float64)
            far = float((p.double() - exact).abs().max() / exact.abs().max())
            assert far <= 4 * max(torch.finfo(v.dtype).eps for v in (p, *opt.state[p].values())), f"{label}: {far:.3g}"


@scenario(CHAPTER)
def test_with_a_graph(world: World) -> None:
    """Gradients with a graph of their own, from ``backward(create_graph=True)``."""
    p = world.param((13, 18), 1)
    opt = world.make([p])
    for step in range(3):
        opt.zero_grad()
        (p * p * world.values(p.shape, step)).sum().backward(create_graph=True)
        opt.step()
    world.show("trained", opt, [p])


@scenario(CHAPTER)
def test_one_for_two_parameters(world: World) -> None:
    """One tensor as the gradient of two parameters, and a gradient that is a view of a larger flat one."""
    params, opt = world.begin([(13, 18)] * 4)
    for step in range(3):
        views = world.values((3 * 13 * 18,), step).view(3, 13, 18).unbind()
        for p, grad in zip(params, (*views, views[0]), strict=True):
            p.grad = grad
        opt.step()
    world.show("trained", opt, params)


@scenario(CHAPTER)
def test_broadcast_over_a_larger_parameter(world: World) -> None:
    """A parameter grows between two steps into what the gradient that is left, and state, could be broadcast to."""
    for old, new in (((1,), (4,)), ((), (3,)), ((), (1,)), ((1, 3), (5, 3))):
        p = world.param(old)
        opt = world.trained([p], 2)
        before = p.grad.clone()
        p.data = world.values(new, 3)
        world.attempt(f"{old} to {new}", opt.step)
        world.say(f"{old} to {new}: the gradient", torch.equal(p.grad, before))
