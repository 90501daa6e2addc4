"""The report of where the bytes of an optimizer's state are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..common.facts_table import Shown
from ..common.units import text_of_bytes


@dataclass(frozen=True)
class MemoryReport(Shown):
    """Where the bytes of optimizer state are.

    ``torch.cuda.memory_allocated`` counts only placement ``device``; this report and ``nvidia-smi`` count the others.

    Attributes:
        by_place: bytes by where they should be: ``device``, ``host``, ``file``.
        measured: bytes by where the driver or the operating system reports them.  Pages that a save has read from a
            file count as host until the next step.
        placement: name of the placement, e.g. ``mapped``; several are joined by ``+``.
        budget: bytes that may stay on the device (for parameters on a CPU: in RAM), a share converted to bytes; None:
            all, or not known before there is state.
        ring: bytes of the device slots through which pages pass; other optimizers may share them.
        asked: the budget in words, as the user gave it ("50% of the state"); "" for all.
        graphs: bytes on the device of CUDA graphs of staged steps.

    Example:
        >>> report = optimizer.memory_report()
        >>> report.by_place.get("host", 0)      # bytes spilled from a GPU (for parameters on a CPU see "file")
    """

    by_place: Mapping[str, int]
    measured: Mapping[str, int]
    placement: str
    budget: int | None
    ring: int
    asked: str = ""
    graphs: int = 0

    @property
    def means(self) -> str:
        """The placement as reports name it: on a CPU, ``device`` is "ordinary memory"."""
        on_cpu = self.placement == "device" and "device" not in self.by_place
        return "ordinary memory" if on_cpu and self.by_place else self.placement

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the report's title and its (name, text) pairs."""
        rows = [(f"on {place}", self._bytes(place)) for place in self.by_place]
        rows.append(
            ("placement", self.means) if rows else ("state", "none: the first step makes it, if the rule has any")
        )
        if self.budget is not None or self.asked:
            rows.append(("budget", self.asked if self.budget is None else text_of_bytes(self.budget)))
        if self.ring:
            rows.append(("ring of slots", text_of_bytes(self.ring)))
        if self.graphs:
            rows.append(("CUDA graphs", text_of_bytes(self.graphs)))
        return "optimizer state", rows

    def _bytes(self, place: str, where: str = "") -> str:
        """Return the text of the bytes in a place, planned and measured."""
        planned, measured = self.by_place[place], self.measured.get(place, 0)
        read = place == "host" and "file" in self.by_place and measured > planned
        why = ", with pages read since the last step" if read else ""
        return f"{text_of_bytes(planned)}{where} (measured {text_of_bytes(measured)}{why})"

    def __str__(self) -> str:
        parts = [self._bytes(place, f" on {place}") for place in self.by_place]
        if not parts:
            return "no state: the first step makes it, if the rule has any" + (
                f" (budget {self.asked})" if self.asked else ""
            )
        budget = "" if self.budget is None else f", budget {text_of_bytes(self.budget)}"
        ring = f", ring of {text_of_bytes(self.ring)}" if self.ring else ""
        graphs = f", CUDA graphs of {text_of_bytes(self.graphs)}" if self.graphs else ""
        return f"optimizer state ({self.means}{budget}{ring}{graphs}): " + ", ".join(parts)
