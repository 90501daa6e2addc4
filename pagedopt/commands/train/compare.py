"""Do two loss curves agree? Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# The largest difference at any step of a short run, in nats per byte, by type of device.
#
# cpu: float32. Two correct AdamWs differ by rounding alone: 2e-6 at the end of `make train`
# (notes/raw/train-cpu.json). If weight decay is forgotten, a short run exceeds the tolerance
# (tests/commands/test_train.py).
#
# cuda: bfloat16 rounds products a thousand times coarser, and the backward passes of attention and embedding add up in
# an order that varies, so an optimizer does not even repeat its own losses. torch's fused AdamW, run twice from one
# seed: 0.015 apart within 100 steps of `gpt2` on an H200. The tolerance is three times that. It only tells curves that
# diverge from curves that do not; the finer test is float32's.
TOLERANCE = {"cpu": 5e-4, "cuda": 0.05}

# Training amplifies rounding, so no number holds for every number of steps, size and learning rate. Where the
# tolerance is exceeded, torch's foreach AdamW is the yardstick: how far is it from torch's fused one? The largest
# difference from torch's fused AdamW on a CPU, over seeds (notes/raw/train-yardstick-cpu.txt):
#
#     size, steps  seeds  PagedAdamW      torch foreach   no weight decay
#     tiny, 60         4  5e-7 to 8e-5    7e-7 to 5e-5    3e-3 to 3e-2
#     tiny, 300        3  1e-6 to 5e-4    7e-7 to 1e-4    5e-3 to 1e-1
#     tiny, 1000       3  3e-5 to 5e-4    2e-5 to 8e-5    5e-2 to 1e-1
#     tiny, 4000       2  3e-3 to 1e-2    7e-4 to 3e-3    1e-1 to 2e-1
#     small, 60        1  3e-5            8e-5            9e-2
#
# PagedAdamW, which rounds a parameter once, is up to 15 times as far from fused as foreach, whose decay is fused's, in
# runs of one seed; without decay it is at least 69 times. A multiple tells them apart; a tolerance that grows with
# steps would hold for the sizes and rates it was measured at.
FACTOR = 30


@dataclass(frozen=True)
class Comparison:
    """How far apart two curves are, and how far they may be."""

    max_difference: float
    at_step: int  # counted from 1
    mean_difference: float
    tolerance: float | None  # None: the curves are not judged, as the state of one has fewer bits
    torch_difference: float | None = None  # the largest between torch's foreach and fused AdamW, where it was measured

    @property
    def agree(self) -> bool | None:
        """Whether the curves agree; with a NaN they never do.  None: they are not judged."""
        return None if self.tolerance is None else self.max_difference <= self.tolerance

    @property
    def needs_yardstick(self) -> bool:
        """Whether it takes torch's difference from itself to judge these curves."""
        return self.tolerance is not None and self.tolerance < self.max_difference < math.inf

    def beside(self, torch_difference: float) -> Comparison:
        """Return this comparison with the tolerance that torch's difference from itself gives.

        >>> compare([3.0, 2.0], [3.0, 2.5], tolerance=0.1).beside(0.25).tolerance
        7.5
        """
        tolerance = self.tolerance
        if tolerance is not None and torch_difference < math.inf:
            tolerance = max(tolerance, FACTOR * torch_difference)
        return replace(self, tolerance=tolerance, torch_difference=torch_difference)

    def sentence(self, steps: int, first: str, second: str) -> str:
        """Return in words how the curves of ``first`` and ``second``, of ``steps`` steps, compare."""
        if self.tolerance is None:
            return (
                f"The losses of {first} and {second} differ by at most {self.max_difference:.2g} in {steps} steps "
                f"(step {self.at_step}), on average by {self.mean_difference:.2g}. That is not judged: the state of "
                f"{first} has fewer bits."
            )
        own = rule = ""
        if self.torch_difference is not None:
            own = f", torch's foreach and fused AdamW by {self.torch_difference:.2g}"
            rule = f" ({FACTOR} times the latter)" if self.tolerance == FACTOR * self.torch_difference else ""
        return (
            f"The curves {'lie' if self.agree else 'DO NOT lie'} on each other: the losses of {first} and {second} "
            f"differ by at most {self.max_difference:.2g} in {steps} steps (step {self.at_step}){own}; the tolerance "
            f"is {self.tolerance:.2g}{rule}."
        )


def broken(curves: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a sentence for each curve with a loss that is not finite, by the curve's name.

    >>> broken({"one": [3.0, math.nan, math.inf], "other": [3.0, 2.0, 1.0]})
    ['The loss of one is nan in step 2.']
    """
    found = []
    for name, losses in curves.items():
        step = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), 0)
        if step:
            found.append(f"The loss of {name} is {losses[step - 1]} in step {step}.")
    return found


def compare(first: Sequence[float], second: Sequence[float], tolerance: float | None) -> Comparison:
    """Compare two curves step by step. The first difference that is not finite counts as the largest."""
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    broken = (difference for difference in differences if not math.isfinite(difference))
    largest = next(broken, max(differences))
    where = next(step for step, difference in enumerate(differences, 1) if difference is largest)
    return Comparison(largest, where, statistics.fmean(differences), tolerance)
