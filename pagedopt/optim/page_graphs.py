"""A staged plan as one CUDA graph: what moves pages and what updates them, in one call of the driver."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..kernels import cuda
from ..launch.device_step import DeviceStep
from ..launch.sweep import Sweep
from ..launch.table_copy import TableCopy
from ..paging.visits import Action, Span, passes
from ..placements.arena import Arena
from ..placements.movers import NodeMover, Ring, Staged
from ..placements.store import Graphs
from ..system import internals
from ..system.driver import CudaError, Event
from ..system.graphs import BuiltGraph, Nodes
from ..system.warn import log
from ..tables.layout import HostTable
from ..transports.transport import argument_at


def add_staged(
    nodes: Nodes,
    mover: NodeMover,
    actions: Sequence[Action],
    kernel: cuda.CudaKernel,
    table: HostTable,
    at: DeviceStep | TableCopy,
    fences: Sequence[Event | None] = (),
) -> int:
    """Add a staged plan to a graph; return the number of launches over rows.

    Args:
        nodes: the graph.
        mover: adds the visits of pages.
        actions: the plan.
        kernel: updates rows.
        table: the rows.
        at: where the device has them.
        fences: for each launch the event that is recorded behind it; None: none is.
    """
    count, waiting = 0, list(reversed(fences))
    if isinstance(at, DeviceStep):
        prologue, numbers, rows = at.prologue(table)
        mover.launched(prologue.add_to(nodes, numbers, rows, mover.next_launch_behind))

    def launch(span: Span | None) -> None:
        nonlocal count
        assert span is not None, "a plan with visits has spans"
        first, last = span
        if first < last:
            argument = argument_at(at.address, table, span)
            mover.launched(kernel.add_to(nodes, argument, last - first, mover.next_launch_behind))
            count += 1
        if waiting and (fence := waiting.pop()) is not None:
            # In line: a node that others did not follow would be a branch, for which the driver takes a queue that the
            # model's stream may be in, too.
            mover.launched(nodes.record(fence, mover.next_launch_behind))

    for _ in passes(actions, launch, mover):
        pass
    return count


class StagedGraph:
    """The graph of a sweep's staged plan.  It keeps its table alive, but neither tensors, pages nor slots.

    Args:
        sweep: whose table and kernel are those of today.
        actions: a plan with the visits of all pages; rows without a gradient have no elements in the table.
        arenas: see :class:`~pagedopt.paging.policy.Move`.
        ring: the slots.
        kernel: the result of :meth:`Sweep.ready`.
        fenced: the numbers of launches behind which an event is to be recorded, the last one among them.

    Raises:
        CudaError, torch.OutOfMemoryError: the driver refuses it; nothing has been launched.
    """

    def __init__(
        self,
        sweep: Sweep,
        actions: Sequence[Action],
        arenas: Sequence[Staged],
        ring: Ring,
        kernel: cuda.CudaKernel,
        fenced: Collection[int] = (),
    ) -> None:
        index = sweep.device.index
        self._sweep, self._kernel, self._table, self._ring = sweep, kernel, sweep.table.host, weakref.ref(ring)
        transport = sweep.transport
        self._at = transport if isinstance(transport, DeviceStep) else TableCopy(self._table, index)
        launches = max(fenced, default=-1) + 1
        fences = [Event(index) if i in fenced else None for i in range(launches)]
        self._graph = BuiltGraph(index)
        mover = NodeMover(self._graph.nodes, ring, arenas)
        with torch.cuda.device(index):
            self._kernels = add_staged(self._graph.nodes, mover, actions, kernel, self._table, self._at, fences)
            self._graph.instantiate(internals.current_stream(index))
        self._copied_bytes = mover.copied_bytes
        #: For each launch an event that is recorded behind it: at once, or behind the next one that has its own.
        self.fences: list[Event] = []
        for fence in reversed(fences):
            self.fences.append(self.fences[-1] if fence is None else fence)
        self.fences.reverse()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes."""
        return self._graph.nbytes + (self._at.nbytes if isinstance(self._at, TableCopy) else 0)

    def fits(self, kernel: cuda.CudaKernel, ring: Ring) -> bool:
        """Return whether kernel, slots and the sweep's table are those that it was built for."""
        return self._kernel is kernel and self._ring() is ring and self._sweep.table.host is self._table

    def launch(self, ring: Ring) -> None:
        """Launch it on the current stream; ``ring`` has the slots that it was built for.

        Raises:
            CudaError: the driver refuses; nothing was launched.
            SlotsInUse: see :meth:`Ring.acquire`.
        """
        index, sweep = self._sweep.device.index, self._sweep
        with torch.cuda.device(index), ring.held():
            stream = internals.current_stream(index)
            ring.ended.hold(stream)
            self._at.publish(self._table, stream)
            sweep.begun = True  # set here: an interrupt may come behind the launch
            try:
                self._graph.launch(stream)
                sweep.launches += self._kernels
            except CudaError:
                sweep.begun = False
                raise
            finally:  # whatever has risen: others come behind the graph, which may be in flight
                ring.launched(stream, self._copied_bytes)
                if isinstance(self._at, DeviceStep):
                    self._at.launched(stream)


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
