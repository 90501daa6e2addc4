"""A budget that is a time: how many bytes of state may be away if a step may take so much longer."""

from __future__ import annotations

import torch

from ..paging.budget import Budget
from ..placements.choose import Arena
from ..system.log import log
from . import rates as measuring
from .rates import Rates

#: Sections of the widest page that is reckoned with: a step waits for its first page to come and its last one to go.
SECTIONS = 3


class Affordable:
    """Says what a time affords, by the rates of a machine: of the file that the budget names, else those that are given
    here, else those of this machine, which is measured when an answer is first needed (about two seconds).

    Attributes:
        known: the rates that were used last; None: none were.
    """

    __slots__ = ("_given", "_measured", "known")

    def __init__(self, rates: Rates | None = None) -> None:
        self.known = self._given = rates
        self._measured: dict[torch.device, Rates] = {}

    def load(self, budget: Budget) -> Rates | None:
        """The rates that there are without measuring.

        Raises:
            ValueError: the file that the budget names cannot be read, or holds none.
        """
        if budget.rates is None:
            return self._given
        try:
            self.known = Rates.load(budget.rates)
        except (OSError, ValueError) as error:
            reason = f"{budget.rates}: {error.strerror}" if isinstance(error, OSError) else error
            raise ValueError(f"device_budget is {budget.said!r}, and no rates come from there ({reason})") from error
        return self.known

    def check(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> None:
        """Refuse a budget where it is known without measuring that nothing tells what it affords.

        Raises:
            ValueError: the rates have none of the ways that a step would take.
        """
        if (rates := self.load(budget)) is not None:
            affordable(budget, rates, device.type, way, SECTIONS * kind.stretch)

    def __call__(self, budget: Budget, device: torch.device, kind: type[Arena], way: str) -> int:
        """Bytes that may be away.

        Raises:
            ValueError: there are no such rates, which the text says.
        """
        rates = self.load(budget)
        if rates is None:
            if device not in self._measured:
                log.info("measuring %s, to say what device_budget=%r affords", device, budget.said)
                self._measured[device] = measuring.measure(device)
            rates = self.known = self._measured[device]
        return affordable(budget, rates, device.type, way, SECTIONS * kind.stretch)


def affordable(budget: Budget, rates: Rates, device: str, way: str, page: int) -> int:
    """Bytes of state that may be away if a step may take as much longer as a budget says.

    Args:
        device: type of the parameters' device.
        way: in which a step reaches what is away.
        page: bytes of the largest page.

    Raises:
        ValueError: a rate is not known; the text says which, and of what machine.
    """
    seconds = budget.seconds or 0.0
    link = ["in_place"] if way == "in_place" else ["up", "down", "both"]
    needed = ["file_read", "file_write"] if device == "cpu" else link
    known = {name: getattr(rates, name) for name in needed}
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


__all__ = ["Affordable", "affordable"]
