"""What a budget is in bytes on each device; for ``"auto"``, what the machine can spare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..paging import policy
from ..paging.budget import Budget
from ..system import host
from ..system.warn import warn_once
from .arena import Arena


class Limits:
    """The budget of an optimizer, and what it is in bytes on each device."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._measured: dict[torch.device, int] = {}  # what ``"auto"`` gives
        self._steps = 0

    def of(self, device: torch.device, here: Sequence[Arena]) -> Budget:
        """Return the budget of ``device``, whose arenas are ``here``; the first call measures ``"auto"``."""
        if not self.budget.auto:
            return self.budget
        if device not in self._measured:
            self._measured[device] = auto_budget(device, here)
        return Budget(self._measured[device])

    def total(self, arenas: Sequence[Arena]) -> int | None:
        """Return the bytes of the budget, summed over devices where it depends on them; None: all, or no arenas yet."""
        if self.budget.share is None and not self.budget.auto:
            return self.budget.nbytes
        limits = [self.of(device, here).limit(_nbytes(here)) for device, here in by_device(arenas)]
        return sum(limit or 0 for limit in limits) if limits else None

    def remeasure(self, arenas: Sequence[Arena]) -> bool:
        """Return whether ``"auto"`` should move pages.  Called once per step; measures at some of them only."""
        if not self.budget.auto:
            return False
        self._steps += 1
        changed = False
        for device, here in by_device(arenas) if policy.auto_is_due(self._steps) else ():
            now, wanted = sum(map(near_bytes, here)), auto_budget(device, here)
            if policy.worth_moving(now, wanted, _nbytes(here)):
                self._measured[device] = wanted
                changed = True
        return changed


def _nbytes(arenas: Sequence[Arena]) -> int:
    return sum(arena.layout.nbytes for arena in arenas)


def by_device(arenas: Sequence[Arena]) -> list[tuple[torch.device, list[Arena]]]:
    """Return each device with its arenas."""
    return [(device, [a for a in arenas if a.device == device]) for device in {a.device for a in arenas}]


def near_bytes(arena: Arena) -> int:
    """Return the bytes of an arena's resident pages."""
    return arena.planned().get(arena.near, 0) if arena.away != arena.near else 0


def auto_budget(device: torch.device, here: Sequence[Arena]) -> int:
    """Return the bytes that ``"auto"`` gives to state on ``device``; ``here`` are its arenas."""
    ours = sum(map(near_bytes, here))
    if device.type != "cuda":
        room = host.available()
        return policy.spare_bytes(ours + room, ours, room, 0, 0)
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    reserved, used = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    limit = int(total * fraction)
    outside = sum(near_bytes(a) for a in here if a.name != "device")  # not in torch's allocator
    room = max(0, min(free, limit - reserved - outside))
    return policy.spare_bytes(limit, ours, room, reserved - used, stats["allocated_bytes.all.peak"] - used)


def warn_of_no_page(arena: Arena, budget: Budget) -> None:
    """Warn, once, if a budget in bytes, or a share of an arena, is less than one of its pages."""
    page = int(max(arena.layout.page_bytes(), default=0))
    nbytes = budget.nbytes or 0 if budget.share is None else budget.of(arena.layout.nbytes)
    if arena.paged and 0 < nbytes < page:
        warn_once(
            ("budget", budget.said, page),
            f"device_budget={budget.said!r} holds no page of {page:,} bytes on {arena.device}: all state in such "
            "pages is off the device; a budget counts in whole pages",
        )
