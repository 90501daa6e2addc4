"""Where the bytes of an optimizer's state are, as a value that can be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryReport:
    """Where the bytes of optimizer state are.

    Attributes:
        by_place: bytes by where they should be: ``device``, ``host``, ``file``.
        measured: the same as the driver or the operating system has it.
        placement: by what means, e.g. ``mapped``; several are joined by ``+``.
        budget: bytes that may stay on the device (for parameters on a CPU: in RAM), of a share those it comes to;
            None: all, or not known before there is state.
        ring: bytes of the device slots through which pages pass, those of other optimizers among them.

    Example:
        >>> report = optimizer.memory_report()
        >>> report.by_place.get("host", 0)      # what has spilled
    """

    by_place: Mapping[str, int]
    measured: Mapping[str, int]
    placement: str
    budget: int | None
    ring: int

    def __str__(self) -> str:
        parts = [
            f"{nbytes / 2**20:,.1f} MiB on {place} (measured {self.measured.get(place, 0) / 2**20:,.1f})"
            for place, nbytes in self.by_place.items()
        ]
        budget = "" if self.budget is None else f", budget {self.budget / 2**20:,.1f} MiB"
        ring = f", ring of {self.ring / 2**20:,.1f} MiB" if self.ring else ""
        return f"optimizer state ({self.placement}{budget}{ring}): " + (", ".join(parts) or "none yet")
