"""The policy: which pages stay on the device, and in which order the others pass through.  No device and no torch.

A step touches every page once.  Under such a sweep every fixed choice of pages costs the same, and evicting the least
recently used would move them all; so a plan is a boundary: the first pages stay, the rest pass through a ring of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .budget import Budget
from .pages import Indices

#: Slots of the ring through which pages pass: one is filled, one updated, one emptied, one is slack.
SLOTS = 4
#: Share of device memory that ``device_budget="auto"`` leaves free, and the least bytes it leaves.
AUTO_SHARE, AUTO_LEAST = 0.05, 256 << 20
#: ``"auto"`` measures again after these steps, then after every 64.
AUTO_STEPS = (1, 2, 4, 8, 16, 32, 64)


def place(page_bytes: Sequence[Indices], budget: Budget) -> list[int]:
    """How many of the first pages of each arena stay on the device: never more bytes than the budget gives.

    Of bytes, none go to an arena behind one that does not fit whole; of a share, each arena has its own.  So a larger
    budget keeps what a smaller one keeps, and an arena that comes later takes nothing from those that are there.  Of
    one that says how much may be away, never more is.

    Args:
        page_bytes: bytes of each page, by arena, in the order in which the arenas were made.

    Raises:
        ValueError: the budget is ``"auto"`` or a time, which has to be measured first.
    """
    boundaries = []
    if budget.away is not None:
        return _leave(page_bytes, budget.away)
    left = budget.of(sum(int(sizes.sum()) for sizes in page_bytes))
    for sizes in page_bytes:
        total = int(sizes.sum())
        mine = left if budget.share is None else budget.of(total)
        boundaries.append(int(np.searchsorted(np.cumsum(sizes), mine, side="right")))
        left = max(0, left - total)
    return boundaries


def _leave(page_bytes: Sequence[Indices], away: int) -> list[int]:
    """The same where no more than ``away`` bytes may leave: whole pages again, the last ones of the first arenas."""
    boundaries = []
    for sizes in page_bytes:
        leaving = np.cumsum(sizes[::-1])  # by how many pages go
        count = int(np.searchsorted(leaving, away, side="right"))
        boundaries.append(len(sizes) - count)
        away -= int(leaving[count - 1]) if count else 0
    return boundaries


@dataclass(frozen=True, slots=True)
class Move:
    """One visit of a page to the device: fetch it into ``slot``, update it there, evict it."""

    arena: int
    page: int
    slot: int


def schedule(pages: Sequence[tuple[int, int]], slots: int = SLOTS) -> list[Move]:
    """Moves for (arena, page) in the given order, through ``slots`` slots in turn."""
    return [Move(arena, page, i % slots) for i, (arena, page) in enumerate(pages)]


def reserve(total: int) -> int:
    """Bytes that ``"auto"`` leaves free of a device with ``total``."""
    return max(AUTO_LEAST, int(total * AUTO_SHARE))


def spare_bytes(limit: int, ours: int, free: int, cached: int, growth: int) -> int:
    """What ``"auto"`` gives to state.

    Args:
        limit: bytes the process may take of the device (its whole size, unless capped): a share of them stays free.
        ours: bytes of state that are on it now.
        free: bytes the process may still take.
        cached: bytes the caching allocator holds without using them.
        growth: how much more than now the allocator has had in use at its peak.
    """
    return max(0, ours + free + min(0, cached - growth) - reserve(limit))


def auto_is_due(step: int) -> bool:
    """Whether ``"auto"`` measures again after ``step`` steps."""
    return step in AUTO_STEPS or step % AUTO_STEPS[-1] == 0


def worth_moving(now: int, wanted: int, total: int) -> bool:
    """Whether ``"auto"`` moves pages: at once to give room back, otherwise only for a twentieth of the state or to have
    all of it there, as even the last twentieth doubles the time of a step."""
    return wanted < now or wanted - now > total // 20 or wanted >= total > now
