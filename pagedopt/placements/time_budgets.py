"""A budget that is a time: whom to ask how many bytes may be away, and of which way."""

from __future__ import annotations

from typing import Protocol

import torch

from ..paging.budget import Budget
from . import choose
from .arena import Arena
from .choose import HostAccess, Placement
from .limits import Limits


class Affords(Protocol):
    """What says how many bytes may be away if a step on a device may take longer by a budget that is a time."""

    def __call__(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> int:
        """Bytes; may take seconds to measure."""

    def load(self, budget: Budget) -> object:
        """Refuse with a ValueError a file that the budget names and that holds nothing to say it with."""

    def check(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> None:
        """Refuse with a ValueError what can be refused without measuring."""


def limits_of(
    budget: Budget, affords: Affords | None, placement: Placement | None, access: HostAccess | None
) -> Limits:
    """The budget of an optimizer on each device.  Nothing in it knows the optimizer: no circle keeps state alive."""

    def away(device: torch.device) -> int:
        if affords is None:
            raise ValueError(f"device_budget is {budget.said!r}; here it must be bytes or a share")
        return affords(budget, device, *way_of(device, placement, budget, access))

    return Limits(budget, None if budget.seconds is None else away)


def way_of(
    device: torch.device, placement: Placement | None, budget: Budget, access: HostAccess | None
) -> tuple[type[Arena], str]:
    """The placement on a device and how a step reaches what is away there, as far as can be said without trying."""
    kind = choose.kind_of(placement, device, budget)
    return kind, kind.way(access)


__all__ = ["Affords", "limits_of", "way_of"]
