"""What a device holds of an optimizer's state: how many pages of each arena, and what the machine can spare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..paging import policy
from ..paging.budget import Budget
from ..paging.pages import Layout
from ..system.files import host
from .arena import Arena


def divide(arenas: Sequence[tuple[type[Arena], Layout]], budget: Budget) -> list[int]:
    """How many of the first pages of each arena of a device rest there: what making, moving and estimating ask.

    Args:
        arenas: of what kind and how laid out, in the order in which they were made.
        budget: of the device, measured if it is to be.
    """
    paged = iter(policy.place([layout.page_bytes() for kind, layout in arenas if kind.paged], budget))
    return [next(paged) if kind.paged else layout.pages if kind.away is None else 0 for kind, layout in arenas]


class Limits:
    """The budget of an optimizer on each device.

    Args:
        budget: what the user asked for.
        away: of a device, how many bytes a budget that is a time affords; asked once.
    """

    __slots__ = ("_away", "_measured", "_steps", "budget")

    def __init__(self, budget: Budget, away: Callable[[torch.device], int] | None = None) -> None:
        self.budget, self._away = budget, away
        self._measured: dict[torch.device, int] = {}  # bytes that may be away, or with "auto" stay
        self._steps = 0

    def of(self, device: torch.device, here: Sequence[Arena]) -> Budget:
        """The budget of ``device``, in bytes where it is ``"auto"`` or a time, measured when it is first asked for.

        Args:
            here: the arenas of the device.
        """
        if self.budget.seconds is not None and self._away is not None:
            if device not in self._measured:
                self._measured[device] = self._away(device)
            return Budget.leaving(self._measured[device])
        if not self.budget.auto:
            return self.budget
        if device not in self._measured:
            self._measured[device] = auto_budget(device, here)
        return Budget(self._measured[device])

    def total(self, arenas: Sequence[Arena]) -> int | None:
        """Bytes: what was asked for, None for all; of what depends on the device the sum over devices, None if none."""
        if self.budget.share is None and not self.budget.measured:
            return self.budget.nbytes
        limits = [self.of(device, here).limit(_nbytes(here)) for device, here in _by_device(arenas)]
        return sum(limit or 0 for limit in limits) if limits else None

    def remeasure(self, arenas: Sequence[Arena]) -> bool:
        """With ``"auto"``, to be asked once a step: whether a device can spare so much more or less that pages should
        move; measured from time to time."""
        if not self.budget.auto:
            return False
        self._steps += 1
        changed = False
        for device, here in _by_device(arenas) if policy.auto_is_due(self._steps) else ():
            now, wanted = sum(map(near_bytes, here)), auto_budget(device, here)
            if policy.worth_moving(now, wanted, _nbytes(here)):
                self._measured[device] = wanted
                changed = True
        return changed


def _nbytes(arenas: Sequence[Arena]) -> int:
    return sum(arena.layout.nbytes for arena in arenas)


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
