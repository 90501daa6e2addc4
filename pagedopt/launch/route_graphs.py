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

    def launch(
        self,
        sweep: Sweep,
        kernel: Any,
        arenas: Sequence[Arena],
        ring: Ring,
        plan: Callable[[], Plan],
        fenced: bool,
    ) -> StagedGraph | None:
        """Launch a graph, and return it; or launch nothing, and return None.

        Args:
            sweep, kernel, arenas, ring: see :class:`StagedGraph`.
            plan: returns the actions that move all pages, and the launches behind which there is to be an event.
            fenced: whether there are events behind those.
        """
        graph = self._graphs.get(fenced)
        if graph is not None and not graph.fits(kernel, ring):
            self._graphs, self._equal, graph = {}, 0, None
            self._known.lost()
        try:
            if graph is None:
                self._equal += 1
                if not self._known.wanted or self._equal <= self._known.patience.wait:
                    return None
                actions, done = plan()
                graph = StagedGraph(sweep, actions, arenas, ring, kernel, done)
                self._graphs[fenced] = graph
                self._known.alive.add(graph)
            graph.launch(ring)
        except (CudaError, torch.OutOfMemoryError) as error:
            if sweep.begun:  # it was launched
                raise
            log.warning("a step whose state passes through slots goes call by call, not as a graph: %s", str(error))
            self._graphs, self._equal = {}, -RETRY
            return None
        self._known.patience.served += 1
        return graph
