"""One step within a backward, from its first gradient to ``step()``: rows are launched as their gradients come."""

from __future__ import annotations

import atexit
import bisect
import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...launch.sweep import LaunchesOfSpans
from ...paging.arrivals import Arrivals, Visit
from ...paging.pages import Indices
from ...paging.visits import Mover, Span, Update, passes
from ...placements.movers import KnownCalls, OwnMover, Ring
from ...tables.layout import HostTable
from ...tables.tensors import has_memory
from ..launch import Work
from ..pending import REPLACED
from ..plan import Coming, Step, put_state
from .side_stream import SideStream


class _Rows(NamedTuple):
    """The rows of one parameter: of which table, which, and where in the gradient each begins (bytes, elements)."""

    words: npt.NDArray[np.int64]
    at: Indices
    offset: Indices
    numel: Indices


class CyclePlan:
    """What stays the same while steps have the same tables: rows, launches and visits, by id of a parameter.

    Spans count the chunks of all tables, one table behind the other.
    """

    def __init__(self, step: Step, coming: Coming) -> None:
        #: Of each launch: its table, and the number of its first chunk.
        self.tables: list[HostTable] = [work.launch.sweep.table.host for work in step.work]
        self.bases: list[int] = []
        self._chunks = 0
        self.rows: dict[int, _Rows] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self.at_hand: dict[int, list[Span]] = {}
        #: Calls of visits through the ring that was the optimizer's last, and of launches.
        self._ring: Ring | None = None
        self._calls: KnownCalls = {}
        self.launch_calls: LaunchesOfSpans = {}
        found: list[tuple[int, Visit]] = []
        for work in step.work:
            found += self._take(work, coming)
        self.visits = [visit for _, visit in sorted(found, key=lambda each: each[0])]
        #: The parameters that each launch updates, by its span.
        self.updated = {visit.span: visit.needs for visit in self.visits}
        self.updated |= {span: (name,) for name, of in self.at_hand.items() for span in of}
        #: All launches of each table.
        self.actions: list[list[Update]] = [[] for _ in self.tables]
        for span in self.updated:
            number, own = self.place(span)
            self.actions[number].append(Update(own))

    def _take(self, work: Work, coming: Coming) -> Iterator[tuple[int, Visit]]:
        """Take the rows of one table, and yield its visits, each with its turn."""
        launch = work.launch
        table, route, count = launch.sweep.table.host, launch.route, launch.count
        names, base = [*map(id, work.tensors[:count])], self._chunks
        self.bases.append(base)
        self._chunks += len(table.chunk_words)
        if route is None:
            tensor, offset, hand = np.arange(count), np.zeros(count, np.int64), count
            numel = np.array(launch.sweep.table.numels, np.int64)
        else:
            tensor, offset, numel, hand = route.rows.tensor, route.rows.offset, route.rows.numel, route.at_hand
        moves = () if route is None else route.moves
        dtype = launch.sweep.formats[1].columns[0].dtype
        for i, name in enumerate(names):
            if name in coming.expected:
                at = np.flatnonzero(tensor == i)
                self.rows[name] = _Rows(table.row_words, at, offset[at] * dtype.itemsize, numel[at])
                self.dtypes[name] = dtype
        chunks = [
            (base + first, base + last)
            for first, last in table.chunks_of([*((r, r + 1) for r in range(hand)), *(rows for _, rows in moves)])
        ]
        for i, (first, last) in zip(tensor.tolist(), chunks[:hand], strict=False):
            if first < last and names[i] in self.rows:
                mine = self.at_hand.setdefault(names[i], [])
                first = mine.pop()[0] if mine and mine[-1][1] == first else first
                mine.append((first, last))
        turns = [coming.turns[position] for position in launch.positions]
        for (move, (first, last)), span in zip(moves, chunks[hand:], strict=True):
            here = [i for i in np.unique(tensor[first:last]).tolist() if names[i] in self.rows]
            if here:
                yield max(turns[i] for i in here), Visit(move, span, tuple([names[i] for i in here]))

    def place(self, span: Span) -> tuple[int, Span]:
        """Return the number of a span's table, and the span there."""
        number = bisect.bisect_right(self.bases, span[0]) - 1
        base = self.bases[number]
        return number, (span[0] - base, span[1] - base)

    def calls_through(self, ring: Ring) -> KnownCalls:
        """Return the calls of visits, which are kept while the ring stays."""
        if self._ring is not ring:
            self._ring, self._calls = ring, {}
        return self._calls

    def fits(self, step: Step) -> bool:
        """Return whether a step has the tables that this was made for."""
        now = [work.launch.sweep.table.host for work in step.work]
        return len(now) == len(self.tables) and all(a is b for a, b in zip(now, self.tables, strict=True))


class Cycle:
    """One step.  It keeps gradients until their updates have been launched, and on a GPU until they may be given back.

    Attributes:
        params: those whose gradient was taken, by id, in the order of their gradients.
    """

    def __init__(self, plan: CyclePlan, step: Step, side: SideStream | None) -> None:
        self.plan, self.step, self._side = plan, step, side
        self.params: dict[int, torch.Tensor] = {}
        self._grads: dict[int, torch.Tensor] = {}
        self._open = False
        #: By id of a parameter: it and its state, their addresses, and their storages, which are kept to the end.
        self._memory: dict[int, tuple[list[torch.Tensor], list[int], list[object]]] = {}
        for work in step.work:
            count = work.launch.count
            for i, p in enumerate(work.tensors[:count]):
                if id(p) in plan.rows:
                    there = [t for t in (p, *work.tensors[2 * count + i :: count]) if t is not None]
                    self._memory[id(p)] = there, [*map(_address, there)], [*map(_storage, there)]
        for work in step.work:
            work.launch.sweep.begun = False
            work.launch.sweep.table.host.row_words[:, -2] = 0  # no elements, until the gradient is there
        stream = 0 if side is None else side.handle
        self._launches = [
            work.launch.sweep.launch_of_spans(work.launch.sweep.ready(actions), stream, plan.launch_calls)
            for work, actions in zip(step.work, plan.actions, strict=True)
        ]
        self._arrivals = Arrivals(plan.at_hand, plan.visits)
        self._passes = passes(self._arrivals.actions(), self._launch, self._mover())
        if side is not None:
            side.follow()
        self._open = True
        _cycles.add(self)
        self._go_on()

    def _mover(self) -> Mover | None:
        if not self.plan.visits:
            return None
        move, arenas = self.plan.visits[0].move, self.step.ready.arenas
        store = self.step.optimizer.store
        if self._side is None:
            return arenas[move.arena].mover(arenas, store.ring)
        ring = store.ring(arenas[move.arena].device)
        return OwnMover(ring, arenas, self._side.handle, self.plan.calls_through(ring))

    def _launch(self, span: Span | None) -> None:
        assert span is not None, "gradients come one by one"
        for name in self.plan.updated[span]:
            there, addresses, _ = self._memory[name]
            if name in self.params and [*map(_address, there)] != addresses:
                raise RuntimeError(
                    f"{REPLACED} between a backward and the step() that ends its step; replace it after step()"
                )
        number, own = self.plan.place(span)
        self._launches[number](own)

    @property
    def late(self) -> bool:
        """Whether a page had its gradients before one that it had to wait for."""
        return self._arrivals.late > 0

    def begun(self) -> bool:
        """Return whether a launch has begun: part of parameters and state may be new."""
        return any(work.launch.sweep.begun for work in self.step.work)

    def gradient_of(self, p: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a parameter as kernels take it; None: it is left to the plain step behind this one.

        Nothing has been taken yet, whatever is raised.
        """
        grad = p.grad
        if grad is None or self.plan.dtypes.get(id(p)) is not grad.dtype or not has_memory(grad):
            return None
        if grad.stride() != p.stride() or grad.is_neg():
            grad = torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())
        if self._side is not None:
            self._side.follow()
        return grad

    def take(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Take a gradient away from its parameter, and launch what waits for no other."""
        words, at, offset, numel = self.plan.rows[id(p)]
        words[at, 1] = offset + grad.data_ptr()
        words[at, -2] = numel
        self.params[id(p)], self._grads[id(p)], p.grad = p, grad, None
        torch.autograd.graph.increment_version(p)  # whatever has saved it, and is to read it now, is told by autograd
        self._arrivals.arrive(id(p))
        self._go_on()

    def _go_on(self) -> None:
        while not self._arrivals.waits:
            next(self._passes)
        self._keep()

    def _keep(self) -> None:
        done = [self._grads.pop(name) for name in self._arrivals.done]
        self._arrivals.done.clear()
        if self._side is not None and done:
            self._side.keep(done)

    def finish(self) -> None:
        """Launch what is left, and count; the current stream waits.  Parameters without a gradient are skipped."""
        self._arrivals.end()
        for _ in self._passes:
            pass
        self._end()
        optimizer = self.step.optimizer
        for work in self.step.work:
            launch = work.launch
            absent = [i for i, p in enumerate(work.tensors[: launch.count]) if id(p) not in self.params]
            if len(absent) < launch.count:
                written = launch.written_state(optimizer, work.tensors, absent)
                work._replace(absent=absent, written=written).write_numbers()
        self.put_state()

    def put_state(self) -> None:
        """Put new state of parameters whose gradients have come into ``optimizer.state``."""
        put_state(self.step.optimizer, tuple([m for m in self.step.plan.fresh if id(m.param) in self.params]))

    def wait(self) -> None:
        """Let the current stream wait for all updates so far."""
        if self._side is not None:
            self._side.wait()

    def abort(self) -> None:
        """Bring all pages back as they are.  If nothing has begun, parameters have their gradients again."""
        self._passes.close()
        if self.begun():
            self.put_state()  # the next step must not take it for zeros
        else:
            for name, grad in self._grads.items():
                with contextlib.suppress(RuntimeError):  # it does not fit any more
                    self.params[name].grad = grad
        with contextlib.suppress(Exception):  # the error that has led here says more
            self._end()

    def _end(self) -> None:
        if self._side is not None:
            self._side.end()
        self._grads.clear()
        self._open = False

    def __del__(self) -> None:
        """Nobody has called ``step()``: pages go back before parameters and gradients are freed."""
        if self._open:
            self.abort()


_address, _storage = torch.Tensor.data_ptr, torch.Tensor.untyped_storage
_cycles: weakref.WeakSet[Cycle] = weakref.WeakSet()


def _before_exit() -> None:
    """End steps that nobody has ended, while the threads that move pages still run."""
    for cycle in list(_cycles):
        if cycle._open:
            cycle.abort()


getattr(threading, "_register_atexit", atexit.register)(_before_exit)
