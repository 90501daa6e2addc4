"""The learning rate of each step."""

from __future__ import annotations

import math

#: The last step has this part of the peak learning rate.
FLOOR = 0.1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of a step: linear warm-up over a tenth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
