"""What a store knows of the CUDA graphs that its staged steps become."""

from __future__ import annotations

import functools
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


class Graphs:
    """Whether there may be graphs, how long steps must repeat before, and those that live.

    Most stores have no graph, and a process may have thousands of stores: so the parts are made when asked for.
    """

    __slots__ = ("__dict__", "wanted")

    def __init__(self) -> None:
        self.wanted = not asks_for(VARIABLE, "calls", usual="graph")

    @functools.cached_property
    def patience(self) -> Patience:
        """How many equal steps come before a graph is made."""
        return Patience(MOST_PATIENCE)

    @functools.cached_property
    def alive(self) -> weakref.WeakSet[TakesMemory]:
        """Graphs, and slots that they own."""
        return weakref.WeakSet()

    def lost(self) -> None:
        """Note that graphs of a plan can serve no longer; each launch of that plan may say so."""
        if self.patience.served:
            self.patience.lost()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that they take."""
        return sum(each.nbytes for each in vars(self).get("alive", ()))
