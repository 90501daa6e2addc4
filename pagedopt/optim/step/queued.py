"""A step that is queued: launches that its parameters' readers wait for, one after the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from ...placements.arena import Arena
from ...system import internals
from ...system.cuda.driver import Event
from ...system.interrupts import Uninterrupted
from ..state.rule_optimizer import RuleOptimizer
from .launches import PreparedStep
from .update import Update


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the memory that a tensor is a view of; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # fake, functional, sparse
        return None


def why_not(step: PreparedStep) -> str:
    """Return why a step cannot be queued, or ""."""
    updates = step.updates
    if not any(update.route is not None for update in updates):
        return "no page of its state is away"
    if not all(update.lists.plain for update in updates):
        return "parameters or state are complex, DTensors, or have gaps or other strides"
    if len({update.sweep.device for update in updates}) > 1:
        return "parameters are on several devices"
    if any(arena.lock is not None for arena in step.ready.arenas):
        return "state is so small that it shares pages with that of other optimizers"
    return ""


class QueuedStep:
    """A step of an optimizer that has been counted, and whose launches follow.

    On a CPU a launch is carried out when somebody waits for a parameter that it, or one before it, updates.  On a GPU
    all launches are in a stream of their own, and who waits is the current stream.

    Args:
        step: its checks are done; see :func:`why_not`.
        side: the stream of the launches; None on a CPU.
        events: of earlier steps, which are recorded anew; more are added.

    Attributes:
        begun: how many launches somebody has waited for, or has carried out.
        total: the number of launches.
    """

    def __init__(self, step: PreparedStep, side: torch.cuda.Stream | None, events: list[Event]) -> None:
        self._optimizer: weakref.ref[RuleOptimizer] = weakref.ref(step.optimizer)
        self._last: dict[int, int] = {}  # by memory of a parameter: its last launch
        self._gradients: list[list[torch.Tensor]] = []  # by the last launch that reads them
        self._given: dict[int, tuple[torch.Tensor, int]] = {}  # by id of a parameter: its gradient, with its version
        self.total = self._number(step.updates)
        self.begun, self._lock = 0, threading.RLock()
        self._entries = step.entries  # on a GPU launches may run when state is replaced
        self._side, self._events = side, events
        self._waits: dict[int, int] = {}  # by stream: launches that it has waited for
        self._freed = 0
        launches = _launches(step.updates, step.ready.arenas)
        self._launches: Iterator[None] | None = launches
        if side is not None:
            self._owner = torch.cuda.current_stream(side.device)
            self._launch_on(side, launches)
            self._launches = None

    def _number(self, updates: Sequence[Update]) -> int:
        """Find the last launch that reads each parameter and gradient; return how many launches there are."""
        number, last = 0, dict[int, tuple[int, torch.Tensor, torch.Tensor]]()
        for update in updates:
            count = len(update.seen) // 2
            for rows in update.rows_by_launch():
                for i in rows:
                    p, grad = update.tensors[i], update.tensors[count + i]
                    if p is not None and grad is not None:
                        last[id(p)] = number, p, grad
                number += 1
        self._gradients = [[] for _ in range(number)]
        for key, (at, p, grad) in last.items():
            memory = memory_of(p)
            if memory is not None:
                self._last[memory] = max(at, self._last.get(memory, 0))
            self._gradients[at].append(grad)
            self._given[key] = grad, grad._version
        return number

    def _launch_on(self, side: torch.cuda.Stream, launches: Iterator[None]) -> None:
        """Queue all launches on a stream, behind what the current stream has been given, each with an event."""
        side.wait_stream(self._owner)
        with torch.cuda.stream(side):
            for number, _ in enumerate(launches):
                if number == len(self._events):
                    self._events.append(Event(side.device_index))
                self._events[number].record(side.cuda_stream)

    @property
    def all_begun(self) -> bool:
        """Whether every launch has been waited for or carried out."""
        return self.begun == self.total

    def wait_for(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Wait for the updates of parameters; return how many more launches have begun."""
        last = -1
        for tensor in tensors:
            if tensor is not None and (memory := memory_of(tensor)) is not None:
                last = max(last, self._last.get(memory, -1))
        return self._reach(last + 1)

    def wait_for_all(self) -> int:
        """Wait for all updates; return how many more launches have begun."""
        return self._reach(self.total)

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the memory of a parameter for whose update nobody has waited."""
        memory = memory_of(tensor)
        done = self.begun if self._side is None else self._waits.get(_current(self._side), 0)
        return memory is not None and self._last.get(memory, -1) >= done

    def gradients_moved(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether a parameter has another gradient now than this step was given, or the same, written since."""
        for p in params:
            if (grad := p.grad) is not None:
                given, version = self._given.get(id(p), (None, 0))
                if grad is not given or grad._version != version:
                    return True
        return False

    def finish(self) -> int:
        """Wait for all updates, and until every page is back; return how many more launches have begun."""
        more = self.wait_for_all()
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._drop()
        return more

    def finish_on_host(self) -> None:
        """Block the host until all is done: a stream that is being captured cannot wait for another."""
        if self._side is None:
            self.finish()
            return
        self._side.synchronize()
        self.begun = self.total
        self._drop()

    def _reach(self, stop: int) -> int:
        """Wait for the first launches."""
        with self._lock:
            before = self.begun
            if self._launches is not None:
                if stop > before:
                    self._carry_out(stop)
            elif self._side is not None and stop:
                self._hold(self._side, stop)
            return self.begun - before

    def _carry_out(self, stop: int) -> None:
        """Carry out launches on a CPU; behind the last, write pages back."""
        assert self._launches is not None
        optimizer = self._optimizer()
        with Uninterrupted(gives_way=True):
            if optimizer is not None:
                optimizer.damaged = "a queued step ended in the middle"
            try:
                while self.begun < stop:
                    next(self._launches)
                    self.begun += 1
                if self.begun == self.total:
                    next(self._launches, None)
                    self._drop()
            except BaseException as error:
                self._drop()
                if optimizer is not None:
                    optimizer.damaged = f"a queued step failed in the middle ({type(error).__name__}: {error})"
                raise
            if optimizer is not None:
                optimizer.damaged = ""

    def _hold(self, side: torch.cuda.Stream, stop: int) -> None:
        """Let the current stream wait for launches, and give back gradients if it is the one that they came from."""
        current = _current(side)
        if self._waits.get(current, 0) < stop:
            self._events[stop - 1].hold(current)
            self._waits[current] = stop
            if current == self._owner.cuda_stream:
                for grads in self._gradients[self._freed : stop]:
                    grads.clear()
                self._freed = stop
                self._given.clear()
            self.begun = max(self.begun, stop)

    def _drop(self) -> None:
        """Give back all that is kept alive."""
        self._launches = None
        self._gradients, self._given, self._entries = [], {}, ()


def _launches(updates: Sequence[Update], arenas: Sequence[Arena]) -> Iterator[None]:
    """Carry out all updates; yield behind each launch."""
    for update in updates:
        yield from update.passes(arenas)


def _current(side: torch.cuda.Stream) -> int:
    """Return the handle of the current stream on the device of another."""
    return internals.current_stream(side.device_index)
