"""Every placement tried with a few MiB, and a step taken: what works is what has worked."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ...common.units import text_of_rate
from ...paging.budget import ALL, Budget
from ...paging.pages import lay_out
from ...placements.choose import ARENAS, Arena, candidates, default_placement
from ...planning.rates import Rates

#: Elements of the parameter whose state is tried: 16 MiB of state in four pages.  Their numbers are exact in float32.
NUMEL = 1 << 21
#: How far a parameter may be from torch's after one step (a step moves it by the learning rate, 0.1).
TOLERANCE = 1e-6


def try_placements(device: torch.device) -> list[dict[str, Any]]:
    """For every placement of the device's type, whether it works here, and if not why.

    ``promised`` says that it should work: it is refused neither by the device nor for want of one.
    """
    return [
        {"placement": name, "device": str(device), "ways": list(kind.ways) if kind.away else [], **_try(kind, device)}
        for name, kind in ARENAS[device.type].items()
    ]


def absent_placements() -> list[dict[str, Any]]:
    """The same for CUDA devices where there are none."""
    reason = "there is no CUDA device here"
    return [
        {"placement": name, "device": "cuda", "ways": list(kind.ways) if kind.away else [], "promised": False,
         "works": False, "reason": reason}
        for name, kind in ARENAS["cuda"].items()
    ]  # fmt: skip


def _try(kind: type[Arena], device: torch.device) -> dict[str, Any]:
    try:
        if refusal := kind.refusal(device):
            return {"promised": False, "works": False, "reason": refusal}
    except Exception as error:
        return {"promised": True, "works": False, "reason": _words(error)}
    try:
        _allocate_and_move(kind, device)
    except Exception as error:  # whatever goes wrong is the finding
        return {"promised": True, "works": False, "reason": _words(error)}
    return {"promised": True, "works": True, "reason": ""}


def _words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _allocate_and_move(kind: type[Arena], device: torch.device) -> None:
    """Write state, send its pages away and bring them back, and read it again.

    Raises:
        RuntimeError: what is read is not what was written.
        Exception: whatever the placement raises.
    """
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
    """One step of AdamW on the device beside torch's; this compiles the kernel, if no earlier run has."""
    try:
        from ...optim import PagedAdamW

        params = [torch.linspace(-1, 1, 1000, device=device).requires_grad_() for _ in range(2)]
        for p in params:
            p.grad = torch.linspace(1, 2, 1000, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PagedAdamW([params[0]], lr=0.1).step()
        torch.optim.AdamW([params[1]], lr=0.1).step()
        error = (params[0] - params[1]).abs().max().item()
    except Exception as failure:
        return {"works": False, "reason": _words(failure)}
    works = error <= TOLERANCE
    return {"works": works, "reason": "" if works else f"parameters are {error:.2g} from torch's after one step"}


def choices(device: torch.device, tried: list[dict[str, Any]], rates: Rates | None) -> list[dict[str, Any]]:
    """What an optimizer takes that is asked for no placement: without a budget, and with one; and why."""
    found = {t["placement"]: t for t in tried if t["device"] == str(device)}
    budget = Budget(0)
    kinds = candidates(None, device, budget)
    works = [kind for kind in kinds if found[kind.name]["works"]]
    kept = "ordinary memory" if device.type == "cpu" else "the device"
    later = ", until spill() or set_device_budget() moves it" if device.type == "cuda" and works else ""
    whole = {"device_budget": None, "placement": default_placement(device, ALL), "host_access": None,
             "why": f"without a budget all state stays in {kept}{later}"}  # fmt: skip
    if not works:
        why = "; ".join(f"{kind.name}: {found[kind.name]['reason']}" for kind in kinds)
        return [whole, {"device_budget": "bytes", "placement": None, "host_access": None, "why": why}]
    kind = works[0]
    passed = [f"{k.name} does not work: {found[k.name]['reason']}" for k in kinds[: kinds.index(kind)]]
    first = f"the first that works of {', '.join(k.name for k in kinds)}" if len(kinds) > 1 else "the only one"
    way = []
    if len(kind.ways) > 1 and rates is not None:
        way = [f"the link moves {text_of_rate(rates.both)} staged, {text_of_rate(rates.in_place)} in place"]
    why = "; ".join([first, *passed, *way])
    return [whole, {"device_budget": "bytes", "placement": kind.name, "host_access": kind.ways[0], "why": why}]
