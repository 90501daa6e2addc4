"""When a staged plan becomes a graph: once its steps repeat, where its transport and its pages allow it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..paging.visits import Action
from ..placements.arena import Arena
from ..placements.movers import Ring
from ..placements.store import Store
from ..system.cuda.driver import CudaError
from ..system.log import log
from .staged_graph import StagedGraph
from .sweep import Sweep

#: "calls": staged steps go page by page, each with calls of its own, as on a CPU.
VARIABLE = "PAGEDOPT_STAGED"
#: Steps after which the driver is asked again for a graph that it has refused.
RETRY = 256


class RouteGraphs:
    """The graph of one route.

    Args:
        store: of its pages; it counts the graph's bytes, and how long graphs have served.
    """

    __slots__ = ("_equal", "_graph", "_patience", "_store_graphs", "_wanted")

    def __init__(self, store: Store) -> None:
        self._graph: StagedGraph | None = None
        self._equal, self._wanted = 0, os.environ.get(VARIABLE) != "calls"
        self._patience, self._store_graphs = store.patience, store.graphs
        if self._patience.served:  # the graph of a route before this one
            self._patience.lost()

    def launch(
        self, sweep: Sweep, kernel: Any, arenas: Sequence[Arena], ring: Ring, plan: Callable[[], Sequence[Action]]
    ) -> bool:
        """Launch the graph, and return True; or launch nothing, and return False.

        Args:
            sweep, kernel, arenas, ring: see :class:`StagedGraph`.
            plan: returns the actions that move all pages.
        """
        if (graph := self._graph) is not None and not graph.fits(kernel, ring):
            graph = self._graph = None
            self._equal = 0
            self._patience.lost()
        try:
            if graph is None and (graph := self._make(sweep, kernel, arenas, ring, plan)) is None:
                return False
            graph.launch(ring)
        except (CudaError, torch.OutOfMemoryError) as error:
            log.warning("a step whose state passes through slots goes call by call, not as a CUDA graph: %s", error)
            self._graph, self._equal = None, -RETRY
            return False
        self._patience.served += 1
        return True

    def _make(
        self, sweep: Sweep, kernel: Any, arenas: Sequence[Arena], ring: Ring, plan: Callable[[], Sequence[Action]]
    ) -> StagedGraph | None:
        """Return the graph; None: steps have not repeated for long enough."""
        self._equal += 1
        if not self._wanted or self._equal <= self._patience.wait:
            return None
        graph = self._graph = StagedGraph(sweep, plan(), arenas, ring, kernel)
        self._store_graphs.add(graph)
        return graph
