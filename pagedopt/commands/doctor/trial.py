"""Trials: every placement with a few MiB of state, and optimizer steps with state in float32 and in 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from ...paging.budget import NOTHING
from ...paging.pages import lay_out
from ...placements.choose import ARENAS, Arena, candidates

#: Elements of the parameter: 16 MiB of state in four pages. Their indices, which are written, are exact in float32.
NUMEL = 1 << 21
#: Elements of a parameter that takes steps: enough for state in 8 bits.
STEPPED = 5000
#: By format of the state: how many steps are taken, and how far from torch's the parameters may be after them. A step
#: moves them by the learning rate, 0.1. The first step reads no state; the second reads it, within a few percent.
STEPS = {"float32": (1, 1e-6), "int8": (2, 5e-3)}


def try_placements(device: torch.device) -> list[dict[str, Any]]:
    """Return for each placement of the device's type whether it works here, and if not, why.

    ``promised`` says that it should work, as the machine supports it; ``default``, that a budget alone leads to it.
    """
    tried = {name: {"placement": name, **_try(kind, device)} for name, kind in ARENAS[device.type].items()}
    works = [kind.name for kind in candidates(None, device, NOTHING) if tried[kind.name]["works"]]
    return [{**found, "default": works[:1] == [name]} for name, found in tried.items()]


def _try(kind: type[Arena], device: torch.device) -> dict[str, Any]:
    refusal = reason = ""
    try:
        refusal = reason = kind.refusal(device)
        if not refusal and not kind.plain:  # plain state is torch's own tensors
            _allocate_and_move(kind, device)
    except Exception as error:  # any failure is a finding
        reason = _words(error)
    ways = list(kind.ways) if kind.away else []
    return {"ways": ways, "promised": not refusal, "works": not reason, "reason": reason}


def _words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _allocate_and_move(kind: type[Arena], device: torch.device) -> None:
    """Write state, evict and fetch its pages, and raise RuntimeError if it does not read back as written."""
    expected = torch.arange(NUMEL, dtype=torch.float32, device=device)
    layout = lay_out([NUMEL], [4, 4], kind.granule, kind.stretch)
    arena = kind(layout, device, layout.pages // 2 if kind.paged else layout.pages)
    sections = {sign: arena.view(section, 0, expected, torch.float32) for section, sign in enumerate((1, -1))}
    for sign, state in sections.items():
        state.copy_(sign * expected)
    for resident in (0, layout.pages, layout.pages // 2) if kind.paged else ():
        arena.move(resident)
    if not all(torch.equal(state, sign * expected) for sign, state in sections.items()):
        raise RuntimeError("state read back is not what was written")


def try_step(device: torch.device) -> dict[str, Any]:
    """Compare steps of AdamW on the device with torch's. This compiles the kernels unless they are cached."""
    from ...optim import PagedAdamW

    for name, (steps, tolerance) in STEPS.items():
        params = [torch.linspace(-1, 1, STEPPED, device=device).requires_grad_() for _ in range(2)]
        for p in params:
            p.grad = torch.linspace(1, 2, STEPPED, device=device)
        given: Any = {"state_format": name}
        try:
            for each in (PagedAdamW([params[0]], lr=0.1, **given), torch.optim.AdamW([params[1]], lr=0.1)):
                for _ in range(steps):
                    each.step()
        except Exception as failure:  # any failure is a finding
            return {"works": False, "reason": f"{_words(failure)}, with state in {name}"}
        if not (error := (params[0] - params[1]).abs().max().item()) <= tolerance:
            reason = f"parameters are {error:.2g} from torch's after {steps} steps with state in {name}"
            return {"works": False, "reason": reason}
    return {"works": True, "reason": ""}
