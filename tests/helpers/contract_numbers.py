"""The contract: numbers.  torch's fused kernel is the oracle, and a run in float64 the measure of both.

torch's fused kernels differ from each other: that for CUDA takes beta in float32, with 1 - beta of that, and subtracts
the decay, where that for the CPU multiplies by 1 - decay.  Each is the oracle on its own device.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from contract_world import FLAGS, Place, World, ordinary, reference
from edits import numbers
from stand_ins import refusal

from pagedopt.optim.registry import Entry

#: With tails for every vector width, one element, none.
SHAPES = ((4097,), (64, 33), (), (0,), (2, 4096))
#: In the tails of its vectors torch's fused kernel on a CPU rounds otherwise than in them, and is 7 eps away from
#: itself after 1,000 steps: long runs have no tails.
LONG_SHAPES = ((4096,), (64, 32), (0,), (2, 4096))
LONG = 1000
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Bounds: on the root mean square and the largest error as multiples of the oracle's, on the difference from it as a
#: multiple of eps times the largest element, and the share of 16-bit elements that are at most one rounding away.
RMS, MOST, DIFFERENCE, NEAR = 1.05, 1.5, 4.0, 0.999
#: On the root mean square where torch's loop is the oracle in 16 bits, which rounds some elements to the wrong side.
RMS_OF_LOOP = 1.1


def variants(entry: Entry) -> list[dict[str, Any]]:
    """Hyperparameters: nothing at its default; all of it; and each flag of torch's class set, if it takes it."""
    known = inspect.signature(reference(entry)).parameters
    flags = [n for n, p in known.items() if isinstance(p.default, bool) and n not in FLAGS]
    found: list[dict[str, Any]] = [ordinary(entry), {}]
    make = functools.partial(reference(entry), [torch.nn.Parameter(torch.ones(1))])
    for flag in flags:
        for less in ({}, {"dampening": 0.0}):  # nesterov takes none
            hyper = {**ordinary(entry), **less, flag: True}
            if less.keys() <= known.keys() and not refusal(functools.partial(make, **hyper), ValueError):
                found.append(hyper)
                break
    return found


#: Parameters and each kind of state after some steps, all elements of a kind behind each other.
Run = dict[str, torch.Tensor]


def play(kind: Any, hyper: dict[str, Any], dtype: torch.dtype, device: str, steps: int, wide: bool = False) -> Run:
    """``steps`` steps on gradients from integer arithmetic; ``wide``: on the same values in float64."""
    as_is, shapes = torch.float64 if wide else dtype, SHAPES if steps < LONG else LONG_SHAPES
    params = [torch.nn.Parameter(numbers(s, 900 + i, device).to(dtype).to(as_is)) for i, s in enumerate(shapes)]
    optimizer = kind(params, **hyper)
    for step in range(steps):
        for i, p in enumerate(params):
            scale = 5.0 if step % 7 == 0 else 1.0
            p.grad = (numbers(p.shape, 31 * step + 7 * i + 1, device) * scale).to(dtype).to(as_is)
        optimizer.step()
    kinds: dict[str, list[torch.Tensor]] = {"parameter": [p.detach() for p in params]}
    for p in params:
        for name, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                kinds.setdefault(name, []).append(value)
    return {name: torch.cat([t.cpu().flatten() for t in each]) for name, each in kinds.items()}


@functools.cache
def _oracle(entry: Entry, at: int, dtype: torch.dtype, device: str, steps: int) -> tuple[Run, bool]:
    """torch's fused kernel, and True; its loop, and False, where it has none, or in 16 bits one that is wrong."""
    hyper, kind = variants(entry)[at], reference(entry)
    narrow = torch.finfo(dtype).bits == 16
    if entry.torch is not None and (not narrow or fused_is_right(entry, dtype, device)):
        return play(kind, {**hyper, "fused": True}, dtype, device, steps), True
    return play(kind, {**hyper, "foreach": False}, dtype, device, steps), False


@functools.cache
def _exact(entry: Entry, at: int, dtype: torch.dtype, device: str, steps: int) -> Run:
    return play(reference(entry), {**variants(entry)[at], "foreach": False}, dtype, device, steps, wide=True)


@functools.cache
def fused_is_right(entry: Entry, dtype: torch.dtype, device: str) -> bool:
    """Whether one step of torch's fused kernel is one in float64 to a rounding or two.

    torch 2.13's of SGD on a CPU is not, in 16 bits.
    """
    hyper = {**ordinary(entry), "lr": 0.1, "fused": True}
    once = play(reference(entry), hyper, dtype, device, 1)["parameter"].double()
    exact = play(reference(entry), {**hyper, "fused": None, "foreach": False}, dtype, device, 1, wide=True)["parameter"]
    return bool(((once - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs().clamp(min=0.1)).all())


def failures(entry: Entry, at: int, dtype: torch.dtype, place: Place, steps: int) -> list[str]:
    """What lies outside of the bounds, in words."""
    narrow = torch.finfo(dtype).bits == 16
    oracle, is_fused = _oracle(entry, at, dtype, place.device, steps)
    world = World(entry, place.device, dict(place.options))
    mine = play(world.kind, {**variants(entry)[at], **place.options}, dtype, place.device, steps)
    assert mine.keys() == oracle.keys()
    found = []
    for name, value in mine.items():
        if name == "step":
            assert torch.equal(value, oracle[name])
        elif narrow and is_fused:
            found += _judge_near(name, value, oracle[name])
        else:
            if is_fused:
                found += _judge_difference(name, value, oracle[name])
            if dtype is not torch.float64:
                exact = _exact(entry, at, dtype, place.device, steps)[name]
                found += _judge_error(name, value, oracle[name], exact, RMS if is_fused else RMS_OF_LOOP)
    return found


def _judge_near(name: str, mine: torch.Tensor, fused: torch.Tensor) -> list[str]:
    own = torch.finfo(mine.dtype)
    x, y = mine.double(), fused.double()
    near = float(((x - y).abs() <= own.eps * y.abs().clamp(min=own.tiny)).double().mean())
    return [] if near >= NEAR else [f"{name}: only {near:.5f} are within a rounding of fused"]


def _judge_difference(name: str, mine: torch.Tensor, fused: torch.Tensor) -> list[str]:
    far = float((mine.double() - fused.double()).abs().max() / (torch.finfo(mine.dtype).eps * fused.abs().max()))
    return [] if far <= DIFFERENCE else [f"{name}: {far:.2f} eps from fused"]


def _judge_error(name: str, mine: torch.Tensor, oracle: torch.Tensor, exact: torch.Tensor, rms: float) -> list[str]:
    ours, theirs = mine.double() - exact, oracle.double() - exact
    found = []
    if (a := float(ours.square().mean().sqrt())) > rms * (b := float(theirs.square().mean().sqrt())):
        found.append(f"{name}: rms error {a:.3g}, the oracle's {b:.3g}")
    if (a := float(ours.abs().max())) > MOST * (b := float(theirs.abs().max())):
        found.append(f"{name}: error {a:.3g}, the oracle's {b:.3g}")
    return found
