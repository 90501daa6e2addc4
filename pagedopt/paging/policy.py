"""The policy: which pages stay on the device, and in which order the others pass through.  No device and no torch.

A step touches every page once.  So every fixed choice of resident pages costs the same, and least-recently-used
eviction would move them all.  The policy is a boundary: the first pages stay, the others pass through a ring of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .budget import Budget
from .pages import Indices

#: Slots of the ring through which pages pass: one is filled, one updated, one emptied, and one is spare.
SLOTS = 4
#: Bytes of gradients that may wait for their updates within a backward, before that waits for the oldest.
HELD = 512 << 20
#: Share of device memory that ``device_budget="auto"`` leaves free, and the least bytes it leaves.
AUTO_SHARE, AUTO_MIN = 0.05, 256 << 20
#: ``"auto"`` measures again after these steps, then after every 64.
AUTO_STEPS = (1, 2, 4, 8, 16, 32, 64)


def resident_pages(page_bytes: Sequence[Indices], budget: Budget) -> list[int]:
    """Return how many of the first pages of each arena stay on the device: never more bytes than the budget allows.

    A budget in bytes gives nothing to arenas after one that does not fit whole; a share applies to each arena.  So a
    larger budget includes the pages of a smaller one, and later arenas take nothing from earlier ones.

    ``page_bytes`` are the bytes of each page, by arena, in the order of creation.  For ``"auto"``, which has to be
    measured first, raise ValueError.
    """
    boundaries, left = [], budget.of(sum(int(sizes.sum()) for sizes in page_bytes))
    for sizes in page_bytes:
        total = int(sizes.sum())
        mine = left if budget.share is None else budget.of(total)
        boundaries.append(int(np.searchsorted(np.cumsum(sizes), mine, side="right")))
        left = max(0, left - total)
    return boundaries


@dataclass(frozen=True, slots=True)
class Move:
    """One visit of a page to the device: fetch it into ``slot``, update it there, evict it."""

    arena: int
    page: int
    slot: int


def schedule(pages: Sequence[tuple[int, int]], slots: int = SLOTS) -> list[Move]:
    """Return moves of (arena, page) in the given order, through ``slots`` slots in turn."""
    return [Move(arena, page, i % slots) for i, (arena, page) in enumerate(pages)]


def reserve(total: int) -> int:
    """Return the bytes that ``"auto"`` leaves free on a device with ``total`` bytes."""
    return max(AUTO_MIN, int(total * AUTO_SHARE))


def spare_bytes(limit: int, ours: int, free: int, cached: int, growth: int) -> int:
    """Return the bytes that ``"auto"`` gives to state.

    Args:
        limit: bytes of the device that the process may use (all, unless capped); a share of them stays free.
        ours: bytes of state on the device now.
        free: bytes that the process may still allocate.
        cached: bytes that the caching allocator holds and does not use.
        growth: how many more bytes than now the allocator had in use at its peak.
    """
    return max(0, ours + free + min(0, cached - growth) - reserve(limit))


def auto_is_due(step: int) -> bool:
    """Tell whether ``"auto"`` measures again after ``step`` steps."""
    return step in AUTO_STEPS or step % AUTO_STEPS[-1] == 0


def worth_moving(now: int, wanted: int, total: int) -> bool:
    """Tell whether ``"auto"`` moves pages: always away; back only for more than a twentieth of the state or for all."""
    # All state is worth moving for, because even the last twentieth doubles the time of a step.
    return wanted < now or wanted - now > total // 20 or wanted >= total > now
