"""What a store knows of the CUDA graphs that its staged steps become."""

from __future__ import annotations

import weakref
from typing import Protocol

from ..common.patience import Patience
from ..system.variables import asks_for

#: "calls": staged steps of optimizers that are made from now on go page by page, each with calls of its own.
VARIABLE = "PAGEDOPT_STAGED"
#: Steps that repeat before a graph of them is made, at most; at first it is made in the second.
MOST_PATIENCE = 64


class TakesMemory(Protocol):
    """A graph."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes."""


def are_wanted() -> bool:
    """Whether staged steps of an optimizer that is made now may be graphs."""
    return not asks_for(VARIABLE, "calls", usual="graph")


class Graphs:
    """Whether there may be graphs, how long steps must repeat before, and those that live."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.patience = Patience(MOST_PATIENCE)
        self.alive: weakref.WeakSet[TakesMemory] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that they take."""
        return sum(graph.nbytes for graph in self.alive)
