"""268 M float32 parameters whose AdamW state, 2.1 GB of it, may lie anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from experiments.lab import Run
from experiments.works.models import HYPER, Work
from pagedopt import MemoryReport, PagedAdamW

FULL = Work("268 M fp32 (16 x 4096²)", [(4096, 4096)] * 16, torch.float32, 28, 5e-5)
QUICK = Work("4 M fp32 (16 x 512²)", [(512, 512)] * 16, torch.float32, 28, 5e-5)
#: Bytes of state per parameter: two moments.
STATE_BYTES = 8
#: Ways whose share of state on the device can be set.
PAGED: dict[str, dict[str, Any]] = {
    "mapped, staged": {"placement": "mapped", "host_access": "staged"},
    "mapped, in place": {"placement": "mapped", "host_access": "in_place"},
    "managed, in place": {"placement": "managed", "host_access": "in_place"},
}
#: Of a row: its way, and how much of the state is on the device.
WAY_AND_SHARE = "{way}, {share:.0%} on the device".format_map


def pace(run: Run) -> None:
    """Rounds for steps of tens of milliseconds."""
    run.rounds, run.seconds = run.size((12, 1.2), (3, 0.1))
    run.warmup = 2


class Problem:
    """The parameters of a run, which is given its pace, and the bytes of all their state."""

    def __init__(self, run: Run) -> None:
        pace(run)
        self.run, self.device, self.work = run, run.device, run.size(FULL, QUICK)
        self.state_bytes = STATE_BYTES * self.work.numel
        self._grads: list[torch.Tensor] | None = None

    def parameters(self) -> list[torch.nn.Parameter]:
        """The same random parameters every time; all share their gradients."""
        params = self.work.parameters(self.device, self._grads)
        self._grads = self._grads or [p.grad for p in params if p.grad is not None]
        return params


def adamw(params: Sequence[torch.nn.Parameter], **options: Any) -> PagedAdamW:
    """PagedAdamW with the hyperparameters that everyone has here."""
    return PagedAdamW(params, **HYPER, **options)


def away_bytes(report: MemoryReport) -> int:
    """Bytes of state that are not on the device."""
    return sum(nbytes for place, nbytes in report.by_place.items() if place != "device")


def placed(report: MemoryReport) -> dict[str, int]:
    """Columns of where an optimizer's bytes are, by its own account and by the system's, and of its ring."""
    own = {f"on {place}": nbytes for place, nbytes in report.by_place.items()}
    measured = {f"measured on {place}": nbytes for place, nbytes in report.measured.items()}
    return {"ring": report.ring, **own, **measured}
