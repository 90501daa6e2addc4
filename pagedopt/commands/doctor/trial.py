"""Trials: every placement with a few MiB of state, and steps with state in float32 and 8 bits, parameters in 16."""

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
#: Formats, how many steps are taken, and how far from torch's the parameters may be after them. A step moves them by
#: the learning rate, 0.1. The first step reads no state; the second reads it, in int8 within a few percent.
STEPS: list[tuple[dict[str, Any], int, float]] = [
    ({"state_format": "float32"}, 1, 1e-6),
    ({"state_format": "int8"}, 2, 5e-3),
    ({"param_format": "bfloat16+16"}, 2, 1e-6),
]


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

    for given, steps, tolerance in STEPS:
        ((option, name),) = given.items()
        values, grad = (torch.linspace(*ends, STEPPED, device=device).bfloat16() for ends in ((-1, 1), (1, 2)))
        params = [values.requires_grad_() if option == "param_format" else values.float().requires_grad_()]
        params.append(values.detach().float().requires_grad_())
        for p in params:
            p.grad = grad.to(p.dtype)
        try:
            ours = PagedAdamW([params[0]], lr=0.1, **given)
            for each in (ours, torch.optim.AdamW([params[1]], lr=0.1)):
                for _ in range(steps):
                    each.step()
        except Exception as failure:  # any failure is a finding
            return {"works": False, "reason": f"{_words(failure)}, with {option}={name!r}"}
        if not (error := (ours.master(params[0]) - params[1]).abs().max().item()) <= tolerance:
            reason = f"parameters are {error:.2g} from torch's after {steps} steps with {option}={name!r}"
            return {"works": False, "reason": reason}
    return {"works": True, "reason": ""}
