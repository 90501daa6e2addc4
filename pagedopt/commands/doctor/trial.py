"""Trials: every placement with a few MiB of state, and optimizer steps with state in float32 and in 8 bits."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ...common.units import text_of_rate
from ...paging.budget import ALL, NOTHING
from ...paging.pages import lay_out
from ...placements.choose import ARENAS, Arena, candidates, default_placement
from ...planning.rates import Rates

#: Elements of the parameter: 16 MiB of state in four pages. Their indices, which are written, are exact in float32.
NUMEL = 1 << 21
#: Elements of a parameter that takes steps: enough for state in 8 bits.
STEPPED = 5000
#: By format of the state: how many steps are taken, and how far from torch's the parameters may be after them. A step
#: moves them by the learning rate, 0.1. The first step reads no state; the second reads it, within a few percent.
STEPS = {"float32": (1, 1e-6), "int8": (2, 5e-3)}


def try_placements(device: torch.device) -> list[dict[str, Any]]:
    """Return for each placement of the device's type whether it works here, and if not, why.

    ``promised`` says that it should work: there is such a device, and it supports the placement.
    """
    return [
        {"placement": name, "device": str(device), "ways": list(kind.ways) if kind.away else [], **_try(kind, device)}
        for name, kind in ARENAS[device.type].items()
    ]


def _try(kind: type[Arena], device: torch.device) -> dict[str, Any]:
    if device.type == "cuda" and not torch.cuda.is_available():
        return {"promised": False, "works": False, "reason": "there is no CUDA device here"}
    try:
        if refusal := kind.refusal(device):
            return {"promised": False, "works": False, "reason": refusal}
        _allocate_and_move(kind, device)
    except Exception as error:  # any failure is a finding
        return {"promised": True, "works": False, "reason": _words(error)}
    return {"promised": True, "works": True, "reason": ""}


def _words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _allocate_and_move(kind: type[Arena], device: torch.device) -> None:
    """Write state, evict and fetch its pages, and raise RuntimeError if it does not read back as written."""
    expected = torch.arange(NUMEL, dtype=torch.float32, device=device)
    layout = lay_out([NUMEL], [4, 4], kind.granule, kind.stretch)
    arena = None if kind.plain else kind(layout, device, layout.pages // 2 if kind.paged else layout.pages)
    sections = [
        torch.zeros_like(expected) if arena is None else arena.view(section, 0, expected, torch.float32)
        for section in range(2)
    ]
    for sign, section in zip((1, -1), sections, strict=True):
        section.copy_(sign * expected)
    if arena is not None and kind.paged:
        for resident in (0, layout.pages, layout.pages // 2):
            arena.move(resident)
    for sign, section in zip((1, -1), sections, strict=True):
        if not torch.equal(section, sign * expected):
            raise RuntimeError("state read back is not what was written")


def try_step(device: torch.device) -> dict[str, Any]:
    """Compare steps of AdamW on the device with torch's. This compiles the kernels unless they are cached."""
    for name, (steps, tolerance) in STEPS.items():
        how = "" if name == "float32" else f" with state in {name}"
        try:
            error = _distance(device, name, steps)
        except Exception as failure:
            return {"works": False, "reason": _words(failure) + how}
        if not error <= tolerance:
            after = "one step" if steps == 1 else f"{steps} steps"
            return {"works": False, "reason": f"parameters are {error:.2g} from torch's after {after}{how}"}
    return {"works": True, "reason": ""}


def _distance(device: torch.device, name: str, steps: int) -> float:
    """Return how far parameters are from torch's after ``steps``, with state in the format of that name."""
    from ...optim import PagedAdamW

    params = [torch.linspace(-1, 1, STEPPED, device=device).requires_grad_() for _ in range(2)]
    for p in params:
        p.grad = torch.linspace(1, 2, STEPPED, device=device)
    given: Any = {"state_format": name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for optimizer in (PagedAdamW([params[0]], lr=0.1, **given), torch.optim.AdamW([params[1]], lr=0.1)):
            for _ in range(steps):
                optimizer.step()
    return (params[0] - params[1]).abs().max().item()


def choices(device: torch.device, tried: list[dict[str, Any]], rates: Rates | None) -> list[dict[str, Any]]:
    """Return an optimizer's defaults, as two dicts: without a budget and with one, each with the reason."""
    found = {t["placement"]: t for t in tried if t["device"] == str(device)}
    kinds = candidates(None, device, NOTHING)
    works = [kind for kind in kinds if found[kind.name]["works"]]
    near = "ordinary memory" if device.type == "cpu" else "the device"
    later = ", until spill() or set_device_budget() moves it" if works else ""
    why = f"without a budget all state stays in {near}{later}"
    whole = {"device_budget": None, "placement": default_placement(device, ALL), "host_access": None, "why": why}
    if not works:
        why = "; ".join(f"{kind.name}: {found[kind.name]['reason']}" for kind in kinds)
        return [whole, {"device_budget": "bytes", "placement": None, "host_access": None, "why": why}]
    kind = works[0]
    reasons = [f"the first that works of {', '.join(k.name for k in kinds)}" if len(kinds) > 1 else "the only one"]
    reasons += [f"{k.name} does not work: {found[k.name]['reason']}" for k in kinds[: kinds.index(kind)]]
    if len(kind.ways) > 1 and rates is not None:
        reasons.append(f"the link moves {text_of_rate(rates.both)} staged, {text_of_rate(rates.in_place)} in place")
    why = "; ".join(reasons)
    return [whole, {"device_budget": "bytes", "placement": kind.name, "host_access": kind.ways[0], "why": why}]
