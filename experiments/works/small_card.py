"""A small card, simulated on a large one.

torch's allocator gets a cap, the card less the state on it, set anew whenever pages move, and a device page that would
not fit beside what torch holds is refused (:func:`pagedopt.placements.device_page_limit`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from pagedopt import PagedAdamW
from pagedopt.system.cuda.page_limit import device_page_limit

SPILLING, BACK = "spilling", "taking back"


class OnCard(PagedAdamW):
    """PagedAdamW on a card of ``nbytes``.

    Attributes:
        moves: rows of what spilling and taking back took.
    """

    nbytes: int
    moves: list[dict[str, Any]]

    @contextlib.contextmanager
    def inserted(self, nbytes: int, state: int) -> Iterator[None]:
        """The card is there for the block, with so many bytes of state on it."""
        self.nbytes, self.moves = nbytes, []
        with device_page_limit(nbytes, torch.cuda.memory_reserved):
            try:
                self.cap(state)
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)

    def cap(self, state: int) -> None:
        """Let torch have what so many bytes of state leave."""
        share = (self.nbytes - state) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Pages move in the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.moves.append({"what": what, "ms": (time.perf_counter() - begin) * 1e3, "clock": "wall"})
            self.cap(self.memory_report().by_place.get("device", 0))

    def spill(self, nbytes: int | str | None = None) -> int:
        """Then torch may have more."""
        with self.timed(SPILLING):
            return super().spill(nbytes)

    def unspill(self) -> None:
        """Then torch may have less."""
        with self.timed(BACK):
            super().unspill()
