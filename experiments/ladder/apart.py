"""What is compiled, in a process of its own that a limit may end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

#: Seconds after which a compilation is given up: that it was is a result.
LIMIT = 300


def compiled_counts(device: str, operation: str, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of the compiled rung of an operation, as :mod:`experiments.ladder.counts` has them."""
    from experiments.ladder.counts import row, tensors
    from experiments.works.batching import installed
    from experiments.works.contenders import COMPILED
    from experiments.works.rungs import OPERATIONS

    (asked,) = (one for one in OPERATIONS if one.name == operation)
    where = current(device)
    for count in counts:
        torch._dynamo.reset()  # each list is a graph of its own, and eight of one function are the most
        step = asked.builds[COMPILED](tensors(count, where)).step
        step()
        yield {**row(asked, COMPILED, count, where, installed(), step), "generated": _generated()}


def _generated() -> int | None:
    """Kernels that Inductor has written so far in this process; None where it does not say."""
    from torch._inductor import metrics

    count = getattr(metrics, "generated_kernel_count", None)
    metrics.reset()
    return count


def compiled_weighed(device: str, key: str, name: str) -> Iterator[dict[str, Any]]:
    """The row of a compiled contender, as :mod:`experiments.ladder.pareto` has it."""
    from experiments.harness.run import Run
    from experiments.harness.show import console
    from experiments.ladder.pareto import Weighing

    yield Weighing(Run(current(device), False, console()), key).row(name)


def compiled_share(device: str, name: str) -> Iterator[dict[str, Any]]:
    """The row of a compiled contender, as :mod:`experiments.ladder.effort` has it."""
    from experiments.harness.run import Run
    from experiments.harness.show import console
    from experiments.ladder.effort import timed

    yield from timed(Run(current(device), False, console()), (name,))


def current(device: str) -> torch.device:
    """The device, made current."""
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found
