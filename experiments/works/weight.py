"""What a step needs besides parameters and gradients: bytes of state, and bytes at the peak of a step.

On a GPU torch's allocator says what it was asked for, and how much it makes of that (blocks of 512 bytes, and what is
too small to be split off a larger one), and the driver what is gone that torch did not take (pages and rings).
On a CPU torch's profiler hears of every allocation of torch's; those of NumPy, Numba and the system it does not see.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.works.trace import trace_events

#: Of the events of a trace, those that say what was allocated or freed.
MEMORY = "[memory]"


class Scales:
    """What a device has taken since this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._at_first = self._now()

    def since(self) -> dict[str, int]:
        """Bytes, 0 on a CPU: what torch's allocator was asked for and still holds (``taken``), and what is gone of the
        device that it has not reserved (``others``)."""
        return {name: value - self._at_first[name] for name, value in self._now().items()}

    def _now(self) -> dict[str, int]:
        if self.device.type == "cpu":
            return {"taken": 0, "others": 0}
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        return {"taken": asked_for(self.device, "current"), "others": others}


def asked_for(device: torch.device, which: str) -> int:
    """Bytes that torch's allocator was asked for: those held now ("current"), or the most at once ("peak")."""
    return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{which}"])


def extra(step: Callable[[], object], device: torch.device) -> int:
    """Bytes at the peak of a step above those at its beginning, as it asks torch for them."""
    if device.type == "cpu":
        return peak(trace_events(step, profile_memory=True))
    torch.cuda.synchronize(device)
    before = asked_for(device, "current")
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return asked_for(device, "peak") - before


def peak(events: Iterable[Mapping[str, Any]]) -> int:
    """The most that the events of a trace had allocated at once, above what there was before them."""
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == MEMORY), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def high_water(reset: bool = False) -> int | None:
    """The most bytes that this process had in RAM (VmHWM); None where the system does not say.

    ``reset``: it begins to count again now, when what was freed has gone back to the system.
    """
    try:
        if reset:
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
