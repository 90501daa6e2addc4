"""What a store knows of the CUDA graphs that its staged steps become."""

from __future__ import annotations

import weakref
from typing import Protocol

from ..common.patience import Patience
from ..system.warn import asks_for

#: "calls": staged steps of optimizers that are made from now on go page by page, each with calls of its own.
VARIABLE = "PAGEDOPT_STAGED"
#: Steps that repeat before a graph of them is made, at most; at first it is made in the second.
MOST_PATIENCE = 64


class TakesMemory(Protocol):
    """A graph."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes."""


class Graphs:
    """Whether there may be graphs, and those that live.

    Attributes:
        wanted: whether there may be graphs.
        patience: how many equal steps come before a graph is made.
        alive: graphs, and slots that they own.
    """

    def __init__(self) -> None:
        self.wanted = not asks_for(VARIABLE, "calls", usual="graph")
        self.patience = Patience(MOST_PATIENCE)
        self.alive: weakref.WeakSet[TakesMemory] = weakref.WeakSet()

    def lost(self) -> None:
        """Note that graphs of a plan can serve no longer; each launch of that plan may say so."""
        if self.patience.served:
            self.patience.lost()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that they take."""
        return sum(each.nbytes for each in self.alive)
