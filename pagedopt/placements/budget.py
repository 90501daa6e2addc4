"""What a device may hold of an optimizer's state: a number of bytes, all of it, or what the machine can spare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..paging import policy
from ..system import host
from .arena import Arena


class Limits:
    """The budget of an optimizer, in bytes for each device.

    Args:
        budget: as :class:`~pagedopt.PagedOptimizer` takes it.

    Raises:
        ValueError, TypeError: it is no budget.
    """

    def __init__(self, budget: policy.Budget) -> None:
        self.budget = policy.check_budget(budget)
        self._auto: dict[torch.device, int] = {}
        self._steps = 0

    def of(self, device: torch.device, here: Sequence[Arena]) -> int | None:
        """Bytes that may stay on ``device``, None for all; ``"auto"`` is measured when it is first asked for.

        Args:
            here: the arenas of the device.
        """
        if self.budget != "auto":
            return self.budget if self.budget is None else int(self.budget)
        if device not in self._auto:
            self._auto[device] = auto_budget(device, here)
        return self._auto[device]

    def total(self, arenas: Sequence[Arena]) -> int | None:
        """The sum over the devices of ``arenas`` where it is measured; else what was asked for."""
        if self.budget != "auto":
            return self.budget if self.budget is None else int(self.budget)
        limits = [self.of(device, here) for device, here in _by_device(arenas)]
        return sum(int(x) for x in limits if x is not None) if limits else None

    def remeasure(self, arenas: Sequence[Arena]) -> bool:
        """With ``"auto"``, to be asked once a step: whether a device can spare so much more or less that pages should
        move; measured from time to time."""
        if self.budget != "auto":
            return False
        self._steps += 1
        changed = False
        for device, here in _by_device(arenas) if policy.auto_is_due(self._steps) else ():
            now, wanted = sum(map(near_bytes, here)), auto_budget(device, here)
            if policy.worth_moving(now, wanted, sum(a.layout.nbytes for a in here)):
                self._auto[device] = wanted
                changed = True
        return changed


def _by_device(arenas: Sequence[Arena]) -> list[tuple[torch.device, list[Arena]]]:
    return [(device, [a for a in arenas if a.device == device]) for device in {a.device for a in arenas}]


def near_bytes(arena: Arena) -> int:
    """Bytes of an arena's resident pages."""
    return arena.planned().get(arena.near, 0) if arena.away != arena.near else 0


def auto_budget(device: torch.device, here: Sequence[Arena]) -> int:
    """Bytes that ``"auto"`` gives to state on ``device``, of which ``here`` are the arenas."""
    ours = sum(map(near_bytes, here))
    if device.type != "cuda":
        room = host.available()
        return policy.spare_bytes(ours + room, ours, room, 0, 0)
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    reserved, used = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    limit = int(total * fraction)
    outside = sum(near_bytes(a) for a in here if a.name != "device")
    room = max(0, min(free, limit - reserved - outside))
    return policy.spare_bytes(limit, ours, room, reserved - used, stats["allocated_bytes.all.peak"] - used)
