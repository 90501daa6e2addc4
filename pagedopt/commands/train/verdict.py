"""Do the contenders agree? Each answer is whether they do, and a sentence."""

from __future__ import annotations

import math

import torch

from ...formats.names import full_name
from .contender import Contender


def tolerance(device: torch.device, stored: str | None, steps: int) -> float:
    """Return how far ours and torch's losses may be apart at any step, in nats per byte.

    Training amplifies rounding. In float32, AdamWs that round otherwise were 5e-7 to 8e-5 apart within 60 steps, and
    2e-5 to 5e-4 within 1,000; one that forgets weight decay 3e-3 and 5e-2 (notes/raw/train-yardstick-cpu.txt). A GPU
    multiplies in bfloat16, and a step at which the loss jumps amplifies more: on an H200 torch's fused and foreach
    AdamW were 0.003 apart within 200 steps, ours 0.008, and once 0.084 within 300 (notes/raw/train-yardstick-h200.txt).
    State or parameters of fewer bits train otherwise: their curve has to stay in sight of torch's. ``stored`` is the
    format of one of them.
    """
    if full_name(stored or "float32") not in ("float32", "float64"):
        return 1.0
    return 0.25 if device.type == "cuda" else min(0.05, max(5e-4, 1e-5 * steps))


def curves_agree(theirs: Contender | None, ours: Contender, allowed: float) -> tuple[bool, str]:
    """Compare the losses of every step. Losses that are not finite never agree."""
    if theirs is None:
        first, last = ours.losses[0], ours.losses[-1]
        return math.isfinite(last), f"torch has no such optimizer; the loss went from {first:.3f} to {last:.3f}."
    apart = [d if math.isfinite(d := abs(a - b)) else math.inf for a, b in zip(theirs.losses, ours.losses, strict=True)]
    agree = (most := max(apart)) <= allowed
    where = f"{most:.2g} (step {apart.index(most) + 1} of {len(apart)})"
    reason = ", as state or parameters of fewer bits may" if allowed == 1 else ""
    return agree, (
        f"The curves {'agree' if agree else 'DO NOT AGREE'}: the losses of {ours.name} and {theirs.name} differ by at "
        f"most {where}{reason}; the tolerance is {allowed:.2g}."
    )


def bits_equal(resident: Contender, spilled: Contender) -> tuple[bool, str]:
    """Compare the bits of all losses, and of the weights after the last step."""
    equal = all(map(torch.equal, _bits(resident), _bits(spilled)))
    changed = "has changed no bit" if equal else "HAS CHANGED BITS"
    return equal, f"The budget {changed} of {len(resident.losses)} losses and of the weights they led to."


def _bits(contender: Contender) -> list[torch.Tensor]:
    values = [torch.tensor(contender.losses), *(p.detach().flatten() for p in contender.model.parameters())]
    return [value.view(torch.uint8) for value in values]
