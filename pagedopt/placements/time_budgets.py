"""Budgets that are times: ask the caller's rates how many bytes may be away."""

from __future__ import annotations

from typing import Protocol

import torch

from ..paging.budget import Budget
from . import choose
from .arena import Arena
from .choose import HostAccess, Placement
from .limits import Limits


class Affords(Protocol):
    """Converts a budget that is a time into bytes: how much may be away if a step may take that much longer."""

    def __call__(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> int:
        """Return bytes; may take seconds to measure."""

    def load(self, budget: Budget) -> object:
        """Read the rates file that the budget names; raise ValueError if it holds no rates."""

    def check(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> None:
        """Raise ValueError if the budget can be refused without measuring."""


def limits_of(
    budget: Budget, affords: Affords | None, placement: Placement | None, access: HostAccess | None
) -> Limits:
    """Return the limits of a budget.  They hold no reference to the optimizer: a cycle would keep its state alive."""

    def affordable(device: torch.device) -> int:
        if affords is None:
            raise ValueError(f"device_budget is {budget.said!r}; here it must be bytes or a share")
        return affords(budget, device, *way_of(device, placement, budget, access))

    return Limits(budget, affordable)


def way_of(
    device: torch.device, placement: Placement | None, budget: Budget, access: HostAccess | None
) -> tuple[type[Arena], str]:
    """Return the placement on a device, before any stand-in, and how a step reaches its pages that are away."""
    kind = choose.kind_of(placement, device, budget)
    return kind, kind.way(access)
