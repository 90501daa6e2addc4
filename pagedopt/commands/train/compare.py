"""Do two loss curves lie on each other? Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# In nats per byte, for the largest difference at any step, by type of device.
#
# cpu: float32. Two correct AdamWs differ by rounding alone: 2e-6 at the end of `make train`
# (experiments/results/train-cpu.json). A forgotten decay goes beyond the tolerance within a short run, which
# tests/commands/test_train.py holds.
#
# cuda: bfloat16 products round a thousand times coarser and the backward passes of attention and of the embedding
# add up in an order that changes from run to run, so even one optimizer against itself does not repeat its losses.
# torch's fused AdamW twice from one seed: 0.015 apart within 100 steps of `gpt2` on an H200. The tolerance is three
# times that and only tells curves that part from curves that do not; the finer test is the float32 one.
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
        """Whether the curves lie on each other; a NaN never does."""
        return self.max_difference <= self.tolerance


def compare(first: Sequence[float], second: Sequence[float], tolerance: float) -> Comparison:
    """Compare two curves step by step. The first difference that is not finite counts as the largest."""
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    broken = (difference for difference in differences if not math.isfinite(difference))
    largest = next(broken, max(differences))
    where = next(step for step, difference in enumerate(differences, 1) if difference is largest)
    return Comparison(largest, where, statistics.fmean(differences), tolerance)
