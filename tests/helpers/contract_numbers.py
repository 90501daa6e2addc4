"""The contract: numbers.  torch's fused kernel is the oracle, and a run in float64 the measure of both."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from contract_world import FLAGS, Place, World, ordinary, reference
from edits import numbers

from pagedopt.optim.registry import Entry

#: Of several chunks' tails, of a warp's, one element, none; in the last torch's vectors have no tail.
SHAPES = ((4097,), (64, 33), (), (0,), (2, 4096))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Bounds: on the root mean square and the largest error as multiples of the oracle's, on the difference from it as a
#: multiple of eps times the largest element, and the share of 16-bit elements that are at most one rounding away.
RMS, MOST, DIFFERENCE, NEAR = 1.05, 1.5, 4.0, 0.999

Tensors = list[torch.Tensor]


def variants(entry: Entry) -> list[dict[str, Any]]:
    """Hyperparameters: nothing at its default; all of it; and each flag of torch's class set, if it takes it."""
    known = inspect.signature(reference(entry)).parameters
    flags = [n for n, p in known.items() if isinstance(p.default, bool) and n not in FLAGS]
    found: list[dict[str, Any]] = [ordinary(entry), {}]
    for flag in flags:
        for less in ({}, {"dampening": 0.0}):  # nesterov takes none
            hyper = {**ordinary(entry), **less, flag: True}
            if less.keys() <= known.keys() and _taken(entry, hyper):
                found.append(hyper)
                break
    return found


def _taken(entry: Entry, hyper: dict[str, Any]) -> bool:
    try:
        reference(entry)([torch.nn.Parameter(torch.ones(1))], **hyper)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Run:
    """Parameters and state after some steps, by name."""

    tensors: dict[str, torch.Tensor]


def play(kind: Any, hyper: dict[str, Any], dtype: torch.dtype, device: str, steps: int, wide: bool = False) -> Run:
    """``steps`` steps on gradients from integer arithmetic; ``wide``: on the same values in float64."""
    as_is = torch.float64 if wide else dtype
    params = [torch.nn.Parameter(numbers(s, 900 + i, device).to(dtype).to(as_is)) for i, s in enumerate(SHAPES)]
    optimizer = kind(params, **hyper)
    for step in range(steps):
        for i, p in enumerate(params):
            scale = 5.0 if step % 7 == 0 else 1.0
            p.grad = (numbers(p.shape, 31 * step + 7 * i + 1, device) * scale).to(dtype).to(as_is)
        optimizer.step()
    found = {f"parameter {i}": p.detach().cpu() for i, p in enumerate(params)}
    for i, p in enumerate(params):
        for name, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                found[f"{name} {i}"] = value.detach().cpu().clone()
    return Run(found)


@functools.cache
def _theirs(entry: Entry, at: int, dtype: torch.dtype, device: str, steps: int) -> tuple[Run, Run | None, Run]:
    """torch's loop, its fused kernel where it has one, and the run in float64."""
    hyper, kind = variants(entry)[at], reference(entry)
    loop = {**hyper, "foreach": False}
    fused = play(kind, {**hyper, "fused": True}, dtype, device, steps) if entry.torch else None
    return play(kind, loop, dtype, device, steps), fused, play(kind, loop, dtype, device, steps, wide=True)


def ours(entry: Entry, at: int, dtype: torch.dtype, place: Place, steps: int) -> Run:
    world = World(entry, place.device, dict(place.options))
    return play(world.kind, {**variants(entry)[at], **place.options}, dtype, place.device, steps)


def failures(entry: Entry, at: int, dtype: torch.dtype, place: Place, steps: int) -> list[str]:
    """What lies outside of the bounds, in words."""
    loop, fused, exact = _theirs(entry, at, dtype, place.device, steps)
    mine = ours(entry, at, dtype, place, steps)
    assert mine.tensors.keys() == loop.tensors.keys()
    found = []
    for name, value in mine.tensors.items():
        if name.startswith("step") or not value.numel():
            continue
        oracle = loop if fused is None or _broken(fused, loop, exact, name) else fused
        words = _judge(value, oracle.tensors[name], exact.tensors[name], oracle is loop)
        found += [f"{name}: {word}" for word in words]
    return found


def _broken(fused: Run, loop: Run, exact: Run, name: str) -> bool:
    """Whether torch's own fused kernel is wrong here: it is on a CPU for SGD's momentum in 16 bits (torch 2.13)."""
    theirs, best = (_rms(run.tensors[name], exact.tensors[name]) for run in (fused, loop))
    return not theirs <= 3 * best + 1e-12


def _judge(mine: torch.Tensor, oracle: torch.Tensor, exact: torch.Tensor, is_loop: bool) -> list[str]:
    eps, words = torch.finfo(mine.dtype).eps, []
    x, y, z = mine.double(), oracle.double(), exact.double()
    if eps > 1e-4:  # 16 bits; torch's loop rounds them after every operation, a kernel once
        if is_loop:
            return [] if _rms(x, z) <= RMS * _rms(y, z) else [f"error {_rms(x, z):.3g}, the loop's {_rms(y, z):.3g}"]
        near = ((x - y).abs() <= eps * y.abs().clamp(min=torch.finfo(mine.dtype).tiny)).double().mean()
        return [] if near >= NEAR else [f"only {near:.5f} are within a rounding of fused"]
    if not is_loop and (x - y).abs().max() > DIFFERENCE * eps * y.abs().max():
        words.append(f"{((x - y).abs().max() / (eps * y.abs().max())):.2f} eps from fused")
    if mine.dtype is torch.float32:
        if _rms(x, z) > RMS * _rms(y, z):
            words.append(f"rms error {_rms(x, z):.3g}, the oracle's {_rms(y, z):.3g}")
        if (x - z).abs().max() > MOST * (y - z).abs().max():
            words.append(f"error {(x - z).abs().max():.3g}, the oracle's {(y - z).abs().max():.3g}")
    return words


def _rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())
