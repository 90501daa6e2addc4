"""Divides a launch whose state is partly away: rows at hand go first, others when their page visits the device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels import cuda
from ..launch.on_device import DeviceStep, TableCopy
from ..launch.sweep import Sweep
from ..paging.pages import Indices, Pieces, cut
from ..paging.policy import Move, schedule
from ..paging.visits import Action, Mover, Span, passes, plan
from ..placements.arena import Arena
from ..placements.movers import NodeMover, Ring, Slots, Staged, slot_offset
from ..placements.store import Store, find
from ..system import graphs, internals
from ..system.driver import CudaError, Event
from ..system.graphs import BuiltGraph, Nodes
from ..system.warn import log
from ..tables.layout import BLOCK, Geometry, HostTable, choose_geometry
from ..tables.pointers import Rows
from ..transports.transport import argument_at

#: Elements of a chunk while pages move.  Blocks read the table over the link, which copies fill in both directions, so
#: chunks are large.  With 32,768 a step took 1.4 % longer; from 65,536 on, as long as with a copied table.
CHUNK = 65536
#: A graph moves all pages: if it moved a larger share of them in vain, the step goes call by call.
MOST_IN_VAIN = 0.1
#: Steps after which the driver is asked again for a graph that it has refused.
RETRY = 256

#: Moves of pages, each with the (first, last) of its rows or chunks.
Visits = tuple[tuple[Move, Span], ...]
#: The shift of rows that are updated in place.
_IN_PLACE = np.zeros((1, 1), np.uint64)


@dataclass(slots=True)
class Route:
    """Rows in the order of their updates: those that need no page first, then page by page.

    Attributes:
        at_hand: number of rows in the first launch.
        moves: the visit of each page, and (first, last) of its rows.
    """

    store: Store
    device: torch.device
    rows: Rows
    at_hand: int
    moves: Visits
    _graphs: dict[bool, StagedGraph] = field(default_factory=dict, init=False)  # with fences, or without
    _equal: int | None = field(default=None, init=False)  # steps that could have been graphs; None: so far none
    _planned: tuple[HostTable, tuple[int, ...]] | None = field(default=None, init=False)
    _plan: tuple[Action, ...] = field(default=(), init=False)
    _launched: list[Span] = field(default_factory=list, init=False)
    _visiting: int = field(default=0, init=False)
    _whole_params: tuple[HostTable, list[list[int]]] | None = field(default=None, init=False)

    @property
    def geometry(self) -> Geometry | None:
        """How to cut the rows into chunks; None: the default."""
        usual = choose_geometry(self.rows.numel.tolist())
        return Geometry(CHUNK, BLOCK) if self.device.type == "cuda" and usual.threads == BLOCK else None

    def plan(self, table: HostTable, absent: Sequence[int] = ()) -> tuple[Action, ...]:
        """Return a step's actions; pages that have only parameters in ``absent``, without gradients, do not move."""
        if self._planned is None or self._planned[0] is not table or self._planned[1] != tuple(absent):
            at_hand, visits, self._launched = self._visits(table, absent)
            self._visiting = len(visits)
            self._plan, self._planned = tuple(plan(at_hand, visits)), (table, tuple(absent))
        return self._plan

    def _visits(self, table: HostTable, absent: Sequence[int]) -> tuple[Span, Visits, list[Span]]:
        """Return the chunks at hand, the visits that are needed with their chunks, and the rows of each launch."""
        at_hand, *spans = table.chunks_of([(0, self.at_hand), *(rows for _, rows in self.moves)])
        visits = [(move, span) for (move, _), span in zip(self.moves, spans, strict=True)]
        rows = [span for _, span in self.moves]
        if absent:
            skipped = np.isin(self.rows.tensor, absent)
            live = [not skipped[first:last].all() for first, last in rows]
            visits = [visit for visit, needed in zip(visits, live, strict=True) if needed]
            rows = [span for span, needed in zip(rows, live, strict=True) if needed]
        return at_hand, tuple(visits), [(0, self.at_hand), *rows] if at_hand[0] < at_hand[1] else rows

    def params_by_launch(self, whole: bool = False) -> list[list[int]]:
        """Return, for each launch of the last plan, the indices of its parameters, each once.

        Args:
            whole: of the plan that moves all pages, with or without a gradient.
        """
        if not whole:
            return self._params_of(self._launched)
        assert self._planned is not None, "there was a plan"
        table, _ = self._planned
        if self._whole_params is None or self._whole_params[0] is not table:
            self._whole_params = table, self._params_of(self._visits(table, ())[2])
        return self._whole_params[1]

    def _params_of(self, launched: Sequence[Span]) -> list[list[int]]:
        return [np.unique(self.rows.tensor[first:last]).tolist() for first, last in launched]

    def mover(self, arenas: Sequence[Arena]) -> Mover:
        """Return the mover of one step's pages, or raise torch.OutOfMemoryError if the ring of slots does not fit."""
        move, _ = self.moves[0]
        return arenas[move.arena].mover(arenas, self.store.ring)

    def launch(self, sweep: Sweep, actions: Sequence[Action], arenas: Sequence[Arena], kernel: Any) -> None:
        """Launch a step's actions: as one graph, if steps repeat and its rows serve it, else call by call.

        Args:
            sweep: whose rows these are; its hyperparameters are set.
            actions: what :meth:`plan` has returned.
            arenas: indexed by ``Move.arena``.
            kernel: the result of :meth:`Sweep.ready`.

        Raises:
            CudaError, torch.OutOfMemoryError: see :meth:`Sweep.launch`.  A graph that the driver refuses raises
                nothing: the step then goes call by call.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._capture(sweep, arenas, kernel)
        elif (
            self.device.type != "cuda"
            or (graph := self.graph(sweep, arenas, kernel)) is None
            or not self.launch_graph(sweep, graph)
        ):
            sweep.launch(None, actions, self.mover(arenas), ready=kernel)

    def can_be_nodes(self, arenas: Sequence[Arena]) -> bool:
        """Return whether visits can be nodes of a graph: copies between pages of the device and slots."""
        visited = {move.arena for move, _ in self.moves}
        return self.device.type == "cuda" and all(type(arenas[i]).mover is Arena.mover for i in visited)

    def graph(self, sweep: Sweep, arenas: Sequence[Arena], kernel: Any, fenced: bool = False) -> StagedGraph | None:
        """Return a graph of the plan that moves all pages, to be launched; None: the step goes call by call.

        Args:
            sweep, arenas, kernel: see :meth:`launch`.
            fenced: whether the graph has :attr:`StagedGraph.fences`.
        """
        if not (self.can_be_nodes(arenas) and sweep.transport.may_be_copied):
            return None
        if self._visiting < (1 - MOST_IN_VAIN) * len(self.moves):
            return None
        known, ring, graph = self.store.graphs, self.store.ring(self.device), self._graphs.get(fenced)
        if self._equal is None or (graph is not None and not graph.fits(kernel, ring)):
            self._graphs, self._equal, graph = {}, 0, None
            known.lost()  # these, or those of routes before this one
        if graph is None:
            self._equal += 1
            if not known.wanted or self._equal <= known.patience.wait:
                return None
            launches = enumerate(self.params_by_launch(whole=True)) if fenced else ()
            last = {i: number for number, params in launches for i in params}
            actions = self.whole_plan(sweep.table.host)
            try:
                graph = StagedGraph(sweep, actions, arenas, ring, kernel, {*last.values()})
            except (CudaError, torch.OutOfMemoryError) as error:
                self._refused(error)
                return None
            self._graphs[fenced] = graph
            known.alive.add(graph)
        known.patience.served += 1
        return graph

    def launch_graph(self, sweep: Sweep, graph: StagedGraph) -> bool:
        """Launch what :meth:`graph` has returned; or launch nothing, as the driver refuses, and return False.

        Raises:
            CudaError: the driver reports an error behind the launch.
        """
        sweep.begun = False
        try:
            graph.launch(self.store.ring(self.device))
        except (CudaError, torch.OutOfMemoryError) as error:
            if sweep.begun:
                raise
            self._refused(error)
            return False
        return True

    def _refused(self, error: BaseException) -> None:
        """Note that the driver has refused a graph: the next steps go call by call."""
        log.warning("a step whose state passes through slots goes call by call, not as a graph: %s", str(error))
        self._graphs, self._equal = {}, -RETRY

    def whole_plan(self, table: HostTable) -> tuple[Action, ...]:
        """Return the actions of a step that moves all pages, whether their parameters have gradients or not."""
        at_hand, visits, _ = self._visits(table, ())
        return tuple(plan(at_hand, visits))

    def _capture(self, sweep: Sweep, arenas: Sequence[Arena], kernel: Any) -> None:
        """Add a step that moves all pages to the graph that the current stream is being captured into."""
        assert isinstance(sweep.transport, DeviceStep), "a captured step's numbers are on the device"
        index = sweep.device.index
        stream, table = internals.current_stream(index), sweep.table.host
        graph, behind = graphs.end_of_capture(stream)
        nodes = Nodes(graph, index)
        mover = NodeMover(nodes, self.store.slots(self.device), arenas, behind)
        with sweep.transport.lend(table, stream):  # which fills the table in
            sweep.begun = True
            add_staged(nodes, mover, self.whole_plan(table), kernel, table, sweep.transport)
            graphs.go_on_behind(stream, mover.last)


def route(
    store: Store,
    params: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    use: Sequence[int] | None = None,
    by_last: bool = False,
) -> Route | None:
    """Return the route of ``params`` with ``states`` (a list per state name); None: one launch, in place.

    Args:
        use: when each parameter is used.  Pages pass in the order in which their parameters are first used; None: in
            that of addresses.
        by_last: they pass in the order in which their parameters are last used.
    """
    arenas = store.arenas  # this list does not change, even if the store drops an arena meanwhile
    if not params or not states or not arenas:
        return None
    found = [_find(arenas, p, each) for p, each in zip(params, zip(*states, strict=True), strict=True)]
    passing = {
        number
        for number, arena in enumerate(arenas)
        if arena.away and arena.resident < arena.layout.pages and arena.way(store.host_access) == "staged"
    }
    if not any(at is not None and at[0] in passing for at in found) or _half_in(arenas, passing, found, states):
        return None
    parts = _parts(arenas, params, found, passing)
    away = np.array([a >= 0 and p >= arenas[a].resident for a, p in zip(parts.arena, parts.page, strict=True)])
    if not away.any():
        return None
    turn = np.zeros(len(away), np.int64) if use is None else _turns(parts, np.asarray(use), by_last)
    order = np.lexsort((parts.offset, parts.param, parts.page, parts.arena, turn, away))
    parts, at_hand = _Parts(*(column[order] for column in parts)), int((~away).sum())
    moves, device = _moves(parts, at_hand), params[0].device
    shift = _IN_PLACE
    if device.type == "cuda":
        shift = np.zeros((len(order), 2 + len(states)), np.uint64)
        for move, (first, last) in moves:
            shift[first:last, 2:] = _shift(store.slots(device), arenas[move.arena], move)
    return Route(store, device, Rows(parts.param, parts.offset, parts.numel, shift), at_hand, moves)


def _find(arenas: Sequence[Arena], param: torch.Tensor, states: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return :func:`find` of a parameter that has as many elements as its state was made for."""
    at = find(arenas, states)
    return None if at is None or arenas[at[0]].layout.numels[at[1]] != param.numel() else at


class _Parts(NamedTuple):
    """Future rows as parallel arrays; arena and page are -1 if the row's state does not move."""

    param: Indices
    offset: Indices
    numel: Indices
    arena: Indices
    page: Indices


def _turns(parts: _Parts, use: Indices, by_last: bool) -> Indices:
    """Return, for each part, when the first parameter in its page is used; or when the last one is."""
    _, page = np.unique(np.stack([parts.arena, parts.page]), axis=1, return_inverse=True)
    found = np.full(page.max() + 1, use.min() if by_last else use.max())
    (np.maximum if by_last else np.minimum).at(found, page.ravel(), use[parts.param])
    return found[page.ravel()]


def _moves(parts: _Parts, at_hand: int) -> Visits:
    """Return the visit of each page, and (first, last) of its rows; the rows ``at_hand`` come before."""
    keys = np.stack([parts.arena, parts.page], 1)[at_hand:]
    first = at_hand + np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(axis=1)])
    pages = [(int(parts.arena[row]), int(parts.page[row])) for row in first]
    bounds = np.r_[first, len(parts.arena)].tolist()
    return tuple(zip(schedule(pages), itertools.pairwise(bounds), strict=True))


def _half_in(
    arenas: Sequence[Arena],
    passing: set[int],
    found: Sequence[tuple[int, int] | None],
    states: Sequence[Sequence[torch.Tensor]],
) -> bool:
    """Whether a parameter has only part of its state in an arena whose pages move, as somebody replaced a tensor."""
    # An update in place would be lost: the page, fetched before that, is written back after it.
    return any(
        at is None and any(arenas[number].holds(s) for s in each for number in passing)
        for at, each in zip(found, zip(*states, strict=True), strict=True)
    )


def _parts(
    arenas: Sequence[Arena], params: Sequence[torch.Tensor], found: Sequence[tuple[int, int] | None], passing: set[int]
) -> _Parts:
    """Return the pieces of parameters in arenas whose pages move, and other parameters whole."""
    columns: list[tuple[Indices, ...]] = []
    for number in passing:
        pieces: Pieces = cut(arenas[number].layout)
        param = np.full(len(arenas[number].layout.numels), -1, np.int64)
        for i, at in enumerate(found):
            if at is not None and at[0] == number:
                param[at[1]] = i
        param = param[pieces.tensor]
        ours = param >= 0
        arena = np.full(len(param), number)
        columns.append(tuple(x[ours] for x in (param, pieces.offset, pieces.numel, arena, pieces.page)))
    whole = [i for i, at in enumerate(found) if at is None or at[0] not in passing]
    none = np.full(len(whole), -1, np.int64)
    sizes = np.array([params[i].numel() for i in whole], np.int64)
    columns.append((np.array(whole, np.int64), np.zeros(len(whole), np.int64), sizes, none, none))
    return _Parts(*(np.concatenate(c).astype(np.int64) for c in zip(*columns, strict=True)))


def _shift(slots: Slots, arena: Arena, move: Move) -> list[np.uint64]:
    """Return, for each section of a page, the offset in bytes from its address to that in the slot, modulo 2**64."""
    slot, base = slots.address(move.slot), arena.tensor.data_ptr()
    starts = [offset for offset, _ in arena.layout.extents(move.page)]
    return [
        np.uint64((slot + slot_offset(arena.layout, section) - base - start) % 2**64)
        for section, start in enumerate(starts)
    ]


# --- a staged plan as one CUDA graph: what moves pages and what updates them, in one call of the driver ---------------


def add_staged(
    nodes: Nodes,
    mover: NodeMover,
    actions: Sequence[Action],
    kernel: cuda.CudaKernel,
    table: HostTable,
    at: TableCopy,
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
        return self._graph.nbytes + (0 if isinstance(self._at, DeviceStep) else self._at.nbytes)

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
