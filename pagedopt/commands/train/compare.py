"""Do two loss curves agree? Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The largest difference at any step, in nats per byte, by type of device.
#
# cpu: float32. Two correct AdamWs differ by rounding alone: 2e-6 at the end of `make train`
# (experiments/results/train-cpu.json). If weight decay is forgotten, a short run exceeds the tolerance
# (tests/commands/test_train.py).
#
# cuda: bfloat16 rounds products a thousand times coarser, and the backward passes of attention and embedding add up in
# an order that varies, so an optimizer does not even repeat its own losses. torch's fused AdamW, run twice from one
# seed: 0.015 apart within 100 steps of `gpt2` on an H200. The tolerance is three times that. It only tells curves that
# diverge from curves that do not; the finer test is float32's.
TOLERANCE = {"cpu": 5e-4, "cuda": 0.05}


@dataclass(frozen=True)
class Comparison:
    """How far apart two curves are, and how far they may be."""

    max_difference: float
    at_step: int  # counted from 1
    mean_difference: float
    tolerance: float

    @property
    def agree(self) -> bool:
        """Whether the curves agree; with a NaN they never do."""
        return self.max_difference <= self.tolerance

    def sentence(self, steps: int) -> str:
        """Return the result for curves of ``steps`` steps in words."""
        return (
            f"The curves {'lie' if self.agree else 'DO NOT lie'} on each other: the largest difference in {steps} "
            f"steps is {self.max_difference:.2g} (step {self.at_step}), the tolerance {self.tolerance:g}."
        )


def compare(first: Sequence[float], second: Sequence[float], tolerance: float) -> Comparison:
    """Compare two curves step by step. The first difference that is not finite counts as the largest."""
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    broken = (difference for difference in differences if not math.isfinite(difference))
    largest = next(broken, max(differences))
    where = next(step for step, difference in enumerate(differences, 1) if difference is largest)
    return Comparison(largest, where, statistics.fmean(differences), tolerance)
