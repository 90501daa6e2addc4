"""A budget that is a time: how many bytes of state may be away if a step may take so much longer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from ..placements.choose import Arena
from ..system.log import log
from ..units import text_of_seconds
from . import rates as measuring
from .rates import Rates

GivenRates = Rates | str | os.PathLike[str] | None
#: Sections of the widest page that is reckoned with: a step waits for its first page to come and its last one to go.
SECTIONS = 3


@dataclass
class Affordable:
    """Says what a time affords, by the rates of a machine.

    Args:
        rates: of the machine, or the name of a file that ``pagedopt doctor --json`` or :meth:`Rates.save` wrote; None:
            this machine is measured when an answer is first needed, which takes about two seconds.

    Raises:
        OSError, ValueError: the file cannot be read, or holds no rates.
        TypeError: ``rates`` is none of these.
    """

    rates: GivenRates = None
    _known: dict[torch.device, Rates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.rates, (str, os.PathLike)):
            self._given: Rates | None = Rates.load(self.rates)
        elif self.rates is None or isinstance(self.rates, Rates):
            self._given = self.rates
        else:
            raise TypeError(f"rates is {self.rates!r}; give pagedopt.Rates or the name of a file, or None to measure")

    @property
    def known(self) -> Rates | None:
        """Those that were given, else those of a device that was measured; None: none are known yet."""
        return self._given or next(iter(self._known.values()), None)

    def check(self, seconds: float, device: torch.device, kind: type[Arena], way: str) -> None:
        """Refuse a time where the rates that were given do not tell what it affords.

        Raises:
            ValueError: they have none of the ways that a step would take.
        """
        if self._given is not None:
            affordable(seconds, self._given, device.type, way, SECTIONS * kind.stretch)

    def __call__(self, seconds: float, device: torch.device, kind: type[Arena], way: str) -> int:
        """Bytes that may be away.

        Raises:
            ValueError: there are no such rates, which the text says.
        """
        if self._given is None and device not in self._known:
            log.info("measuring %s, to say what a device_budget of %s affords", device, text_of_seconds(seconds))
            self._known[device] = measuring.measure(device)
        return affordable(seconds, self._given or self._known[device], device.type, way, SECTIONS * kind.stretch)


def affordable(seconds: float, rates: Rates, device: str, way: str, page: int) -> int:
    """Bytes of state that may be away if a step may take ``seconds`` longer.

    Args:
        device: type of the parameters' device.
        way: in which a step reaches what is away.
        page: bytes of the largest page.

    Raises:
        ValueError: a rate is not known; the text says which, and of what machine.
    """
    link = ["in_place"] if way == "in_place" else ["up", "down", "both"]
    needed = ["file_read", "file_write"] if device == "cpu" else link
    known = {name: getattr(rates, name) for name in needed}
    if missing := [name for name, rate in known.items() if rate is None]:
        raise ValueError(
            f"device_budget is a time, and no rates tell how long bytes take: those of {rates.machine} have no "
            f"{', '.join(missing)}. Give bytes or a share, or rates of a machine that has them "
            "(`pagedopt doctor --json > FILE` there, and rates=FILE)"
        )
    if device == "cpu":
        return int(seconds / (1 / known["file_read"] + 1 / known["file_write"]))
    if way == "in_place":
        return int(seconds * known["in_place"] / 2)
    alone = 1 / known["up"] + 1 / known["down"]
    if seconds <= page * alone:
        return int(seconds / alone)
    return page + int((seconds - page * alone) * known["both"] / 2)


__all__ = ["Affordable", "GivenRates", "affordable"]
