"""Turns a budget that is a time per step into the bytes of state that may be away."""

from __future__ import annotations

import torch

from ..paging.budget import Budget
from ..placements.choose import Arena
from ..placements.limits import Affords
from ..system.log import log
from . import rates as measuring
from .rates import Rates

#: State names assumed for a page's size.  A step waits for its first page to arrive and its last one to leave.
SECTIONS = 3


class Affordable(Affords):
    """How many bytes of state may be away if a step may take some time longer.

    Rates come from the file that the budget names, else from ``rates``, else from measuring this machine at the first
    call (about two seconds).  ``known`` are the rates used last, or None.
    """

    __slots__ = ("_given", "_measured", "known")

    def __init__(self, rates: Rates | None = None) -> None:
        self.known = self._given = rates
        self._measured: dict[torch.device, Rates] = {}

    def load(self, budget: Budget) -> Rates | None:
        """Return the rates that need no measuring; ValueError: the file that the budget names has none."""
        if budget.rates is None:
            return self._given
        try:
            self.known = Rates.load(budget.rates)
        except (OSError, ValueError) as error:
            reason = f"{budget.rates}: {error.strerror}" if isinstance(error, OSError) else error
            raise ValueError(f"device_budget is {budget.said!r}, and no rates come from there ({reason})") from error
        return self.known

    def check(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> None:
        """Raise a ValueError if rates are known without measuring, and lack one that a step depends on."""
        if (rates := self.load(budget)) is not None:
            affordable(budget, rates, device.type, way, SECTIONS * kind.stretch)

    def __call__(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> int:
        """Return the bytes of state that may be away; ValueError: a rate is missing."""
        rates = self.load(budget)
        if rates is None:
            if device not in self._measured:
                log.info("measuring %s, to say what device_budget=%r affords", device, budget.said)
                self._measured[device] = measuring.measure(device)
            rates = self.known = self._measured[device]
        return affordable(budget, rates, device.type, way, SECTIONS * kind.stretch)


def affordable(budget: Budget, rates: Rates, device: str, way: str, page: int) -> int:
    """Return the bytes of state that may be away if a step may take ``budget.seconds`` longer.

    Args:
        device: type of the parameters' device.
        way: how a step reaches state that is away.
        page: bytes of the largest page.

    Raises ValueError if a rate is not known; the text names it and the machine.
    """
    seconds = budget.seconds or 0.0
    known = {name: getattr(rates, name) for name in rates_away(device, way)}
    if missing := [name for name, rate in known.items() if rate is None]:
        raise ValueError(
            f"device_budget is {budget.said!r}, and no rates tell how long bytes take: those of {rates.machine} have "
            f"no {', '.join(missing)}. Give bytes or a share, or rates of a machine that has them "
            "(`pagedopt doctor --json > FILE` there, and '20 ms by FILE')"
        )
    if device == "cpu":
        return int(seconds / (1 / known["file_read"] + 1 / known["file_write"]))
    if way == "in_place":
        return int(seconds * known["in_place"] / 2)
    alone = 1 / known["up"] + 1 / known["down"]
    if seconds <= page * alone:
        return int(seconds / alone)
    return page + int((seconds - page * alone) * known["both"] / 2)


def rates_away(device: str, way: str | None) -> tuple[str, ...]:
    """Return the names of the rates on which the time for state that is away depends."""
    if device == "cpu":
        return ("file_read", "file_write")
    return ("in_place",) if way == "in_place" else ("up", "down", "both")


__all__ = ["Affordable", "affordable", "rates_away"]
