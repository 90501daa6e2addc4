"""When a staged plan becomes a graph: once its steps repeat, where its transport and its pages allow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..paging.visits import Action
from ..placements.arena import Arena
from ..placements.graphs import Graphs
from ..placements.movers import Ring
from ..system.cuda.driver import CudaError
from ..system.log import log
from .staged_graph import StagedGraph
from .sweep import Sweep

#: Actions, and numbers of launches.
Plan = tuple[Sequence[Action], frozenset[int]]
#: Steps after which the driver is asked again for a graph that it has refused.
RETRY = 256


class RouteGraphs:
    """The graphs of one route: one with fences, for steps that are queued, and one without.

    Args:
        known: what the store of its pages knows of graphs.
    """

    __slots__ = ("_equal", "_graphs", "_known")

    def __init__(self, known: Graphs) -> None:
        self._graphs: dict[bool, StagedGraph] = {}
        self._equal, self._known = 0, known
        known.lost()  # those of routes before this one

    def graph(
        self,
        sweep: Sweep,
        kernel: Any,
        arenas: Sequence[Arena],
        ring: Ring,
        plan: Callable[[], Plan],
        fenced: bool,
    ) -> StagedGraph | None:
        """Return a graph that is to be launched, or None: the step goes call by call.

        Args:
            sweep, kernel, arenas, ring: see :class:`StagedGraph`.
            plan: returns the actions that move all pages, and the launches behind which there is to be an event.
            fenced: whether there are events behind those.
        """
        graph = self._graphs.get(fenced)
        if graph is not None and not graph.fits(kernel, ring):
            self._graphs, self._equal, graph = {}, 0, None
            self._known.lost()
        if graph is None:
            self._equal += 1
            if not self._known.wanted or self._equal <= self._known.patience.wait:
                return None
            actions, done = plan()
            try:
                graph = StagedGraph(sweep, actions, arenas, ring, kernel, done)
            except (CudaError, torch.OutOfMemoryError) as error:
                self.refused(error)
                return None
            self._graphs[fenced] = graph
            self._known.alive.add(graph)
        self._known.patience.served += 1
        return graph

    def refused(self, error: BaseException) -> None:
        """Note that the driver has refused a graph: the next steps go call by call."""
        log.warning("a step whose state passes through slots goes call by call, not as a graph: %s", str(error))
        self._graphs, self._equal = {}, -RETRY
