"""A step that is queued: launches that its parameters' readers wait for, one after the other."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch

from ...launch.device_step import DeviceStep
from ...placements.arena import Arena
from ...system import internals
from ...system.cuda.driver import Event, relaxed_capture
from ...system.interrupts import Uninterrupted
from ..launch import Work
from ..page_graphs import StagedGraph
from ..plan import Step
from ..rule_optimizer import RuleOptimizer, whole
from .pending import REPLACED, LastLaunches, Pending, addresses_of, cannot_be_told, memory_of, version_of


def why_not(step: Step) -> str:
    """Return why a step cannot be queued, or ""."""
    updates = step.work
    if not any(update.route is not None for update in updates):
        return "no page of its state is away"
    if any(map(_reads_hyperparameters, updates)):
        return "a hyperparameter is a tensor that the device reads"
    if not all(update.lists.as_they_are for update in updates):
        return "parameters or state are complex, DTensors, or have gaps or other strides"
    if any(torch.is_inference(t) for update in updates for t in update.seen if t is not None):
        return "parameters or gradients are tensors of torch.inference_mode, which count no writes"
    if len({update.sweep.device for update in updates}) > 1:
        return "parameters are on several devices"
    return ""


def _reads_hyperparameters(update: Work) -> bool:
    """Return whether the launch reads a learning rate or beta from the device when its turn comes."""
    transport = update.sweep.transport if update.sweep.device.type == "cuda" else None
    return isinstance(transport, DeviceStep) and transport.reads_hyperparameters


class QueuedStep:
    """A step that is already counted, whose launches are pending.

    On a CPU a launch is carried out when somebody waits for a parameter that it, or one behind it, updates.  On a GPU
    all launches are in a stream of their own, and who waits is the current stream.  What is a CUDA graph is launched
    when the model's next forward begins, or somebody waits.  The driver mostly serves copies to the device first come,
    first served, even across streams.  So a batch that is copied behind ``step()`` would come behind all pages of a
    graph that is launched there, and the forward with it.

    The caller calls :meth:`launch`, counts the step, and calls :meth:`counted`.  Only then is there something to wait
    for.  After an error or an interrupt :meth:`finish` may be called again: it waits for what is left.

    Args:
        step: its checks are done; see :func:`why_not`.
        side: the stream of the launches; None on a CPU.
        events: of earlier steps, to be used again; the list grows as needed.
        before: :attr:`last` of an earlier step.

    Attributes:
        last: which launch is the last one for each parameter; on a GPU known once the step is queued.
        begun: how many launches somebody has waited for, or has carried out.
        total: the number of launches that can be waited for: all of them, or none until the step is counted.
        misuse: what was done, before its launch, to a parameter or gradient of this step; or "".
        lock: a reentrant one, for all that may not happen in two threads at once.
    """

    def __init__(
        self, step: Step, side: torch.cuda.Stream | None, events: list[Event], before: LastLaunches | None
    ) -> None:
        self._optimizer: weakref.ref[RuleOptimizer] = weakref.ref(step.optimizer)
        self.last, self._updates = before, step.work
        if side is None:
            self.last = LastLaunches.of(step.work, [update.rows_by_launch() for update in step.work], before)
        self._pending: Pending | None = None  # until the step is counted
        self.begun, self.total, self.misuse = 0, 0, ""
        self.lock, self._process = threading.RLock(), os.getpid()
        # Launches may run when it is replaced.
        self._state: list[Any] = [update.tensors[len(update.seen) :] for update in step.work]
        self._addresses = addresses_of(self._state)
        self._side, self._events_of_calls, self._events = side, events, list[Event]()
        self._looked = 0  # launches before which _look() has looked
        self._versions, self._counters = step.optimizer.store.versions, (list[torch.Tensor](), list[int]())
        self._waits: dict[int, int] = {}  # by stream: launches that it has waited for
        self._launches: Generator[None] | None = _launches(step.work, step.ready.arenas) if side is None else None
        self._arenas = step.ready.arenas
        self._later: tuple[Sequence[Work], Sequence[StagedGraph | None]] | None = None  # is still to be launched
        if side is not None:
            self._owner = torch.cuda.current_stream(side.device)

    def launch(self) -> None:
        """On a GPU, get all launches ready, and queue them if they are not to be graphs.

        After an error the current stream waits for those that were queued.
        """
        if (side := self._side) is None:
            return
        updates = self._updates
        try:
            side.wait_stream(self._owner)
            with torch.cuda.stream(side):  # slots and tables that are made belong to it
                graphs = [update.graph(self._arenas) for update in updates]
            rows = [u.rows_by_launch(whole=graph is not None) for u, graph in zip(updates, graphs, strict=True)]
            before, self.last = self.last, LastLaunches.of(updates, rows, self.last)
            if self.last is not before:
                self.last.keep_memory_for(side, updates)
            if all(graph is not None or update.route is None for update, graph in zip(updates, graphs, strict=True)):
                self._later = updates, graphs
            else:
                self._launch_on(side, updates, graphs)
        except BaseException:
            self.finish()
            raise

    def start(self) -> None:
        """On a GPU, launch what :meth:`launch` has left for later, behind what the gradients' stream was given by then.

        Raises:
            SlotsInUse, CudaError: nothing was launched, and the next fence tries again; or state is damaged.
        """
        if self._later is None:
            return
        optimizer = self._optimizer()
        with self.lock, Uninterrupted(gives_way=True):
            if (side := self._side) is None or self._later is None or not self.total:  # it was not counted
                return
            self._look_at_memory(0, self.total)
            if self.misuse == REPLACED:
                self._abandon()
                return
            with contextlib.ExitStack() as written:
                if optimizer is not None:
                    written.enter_context(whole(optimizer, "a queued step", lambda: self._later is None))
                self._launch_later(side)

    def _launch_later(self, side: torch.cuda.Stream) -> None:
        later, self._later = self._later, None
        if later is None:  # a signal handler has just waited for it
            return
        total, self.total = self.total, 0  # nobody can wait for what is not launched yet
        for update in later[0]:
            update.sweep.begun = False
        try:
            for update in later[0]:
                update.check_slots()  # of all, before the first is launched
            self._launch_on(side, *later)
            if not self._state:  # it was dropped
                raise RuntimeError("a signal handler has waited for a step that was being launched")
            self.total = total
        except BaseException:
            if self._state and not any(update.sweep.begun for update in later[0]):
                self._later, self.total = later, total
            elif not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(side.device).wait_stream(side)
                self._owner.wait_stream(side)
            for update in later[0]:
                update.sweep.begun = True  # the step is counted: where step() itself has come here, state is damaged
            raise

    def counted(self) -> None:
        """Remember parameters and gradients as they are, now that the step is counted; fences wait from now on."""
        assert self.last is not None, "it was launched"
        pending = Pending(self.last, self._updates)
        counters = [*self._versions.counters]
        self._counters = counters, [*map(version_of, counters)]
        self._updates, self._pending, self.total = (), pending, pending.total  # all at once, or nothing

    def _launch_on(
        self, side: torch.cuda.Stream, updates: Sequence[Work], graphs: Sequence[StagedGraph | None]
    ) -> None:
        """Queue all launches on a stream, each with an event behind it."""
        events = list[Event]()
        with torch.cuda.stream(side):
            for update, graph in zip(updates, graphs, strict=True):
                if graph is not None and update.launch_graph(graph):
                    events += graph.fences
                else:
                    launches = update.passes(self._arenas, whole=graph is not None)
                    events += self._call_by_call(side, launches, len(events))
        self._events = events

    def _call_by_call(self, side: torch.cuda.Stream, launches: Generator[None], first: int) -> list[Event]:
        """Queue launches one by one, the first one being number ``first``; return the event behind each."""
        spare, end = self._events_of_calls, first
        with contextlib.closing(launches):  # to close it brings fetched pages back
            for _ in launches:
                while len(spare) <= end:
                    spare.append(Event(side.device_index))
                spare[end].record(side.cuda_stream)
                end += 1
        return spare[first:end]

    @property
    def on_host(self) -> bool:
        """Whether fences carry out the launches."""
        return self._side is None

    @property
    def all_begun(self) -> bool:
        """Whether every launch has been waited for or carried out."""
        return self.begun == self.total

    @property
    def all_passed(self) -> bool:
        """Whether the caller (on a GPU, the current stream) has waited for every launch."""
        return self._passed() == self.total

    def updates_any(self, memories: Iterable[int]) -> bool:
        """Return whether this step updates parameters in one of these memories."""
        return self._pending is not None and not self._pending.launch_of.keys().isdisjoint(memories)

    def launch_of(self, tensor: torch.Tensor | None) -> int:
        """Return the number of the last launch that updates memory of a tensor; -1 if none does."""
        memory = None if tensor is None else memory_of(tensor)
        return -1 if memory is None or self._pending is None else self._pending.launch_of.get(memory, -1)

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the memory of a parameter for whose update its reader has not waited."""
        return self.launch_of(tensor) >= self._passed()

    def reads_gradient(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the memory of a gradient that is still to be read."""
        memory = memory_of(tensor)
        return memory is not None and self._pending is not None and self._pending.reads_gradient(memory, self._passed())

    def _passed(self) -> int:
        """Return how many launches the caller (on a GPU, the current stream) has waited for."""
        return self.begun if self._side is None else self._waits.get(_current(self._side), 0)

    def launches_before(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Return how many launches must have begun before a reader of tensors goes on; all, if a memory is unknown."""
        count = 0
        for tensor in tensors:
            if (launch := self.launch_of(tensor)) >= count:
                count = launch + 1
            elif launch < 0 and tensor is not None and cannot_be_told(tensor):
                return self.total
        return count

    def wait_for(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Wait for the updates of parameters; return how many more launches have begun."""
        launches = self.launches_before(tensors)
        return self._reach(launches) if launches else 0

    def wait_for_first(self, launches: int) -> int:
        """Start, and wait for this many launches; return how many more have begun."""
        return self._reach(launches)

    def wait_for_all(self) -> int:
        """Wait for all updates; return how many more launches have begun."""
        with self.lock:  # while another thread launches them there are none
            return self._reach(self.total)

    def finish(self) -> int:
        """Wait for all updates, and until every page is back; return how many more launches have begun."""
        with self.lock:
            more = self.wait_for_all()
            if self._side is not None:
                torch.cuda.current_stream(self._side.device).wait_stream(self._side)
                self._owner.wait_stream(self._side)  # gradients go back to it
            self._drop()
            return more

    def finish_on_host(self) -> None:
        """Block the host until all is done: a stream that is being captured cannot wait for another."""
        if self._side is None:
            self.finish()
            return
        with self.lock, relaxed_capture():  # else CUDA allows no wait while any stream is captured
            self.start()
            self._look(self.total)
            self._side.synchronize()
            self.begun = self.total
            self._drop()

    def _reach(self, stop: int) -> int:
        """Wait for the first launches; return how many more have begun."""
        with self.lock:
            before = self.begun
            if self._side is not None:
                self.start()
                self._hold(self._side, min(stop, self.total))  # there are none behind an error
            elif self._launches is not None and stop > before:
                self._carry_out(stop)
            return self.begun - before

    def _look(self, stop: int) -> None:
        """Note what was done to parameters, gradients and state before the first launches.

        Then raise the versions of the other parameters: if one was read too early and autograd has saved it, the
        backward raises RuntimeError.
        """
        if self._pending is None or stop <= self._looked:
            return
        untouched = self._look_at_memory(self._looked, stop)
        if self.misuse == REPLACED and self._side is None:
            self._abandon()
            return
        counters, versions = self._counters
        if [*map(version_of, counters)] != versions:
            self.misuse = self.misuse or "state was written"
        self._looked = stop  # not before, for misuse would be lost by an interrupt; nor later: our own would be misuse
        torch.autograd.graph.increment_version(untouched)

    def _look_at_memory(self, first: int, stop: int) -> list[torch.Tensor]:
        """Note what was done to the tensors of some launches; return parameters to which nothing was done.

        If memory was replaced, state is damaged: the step was counted.  State is not kept launch by launch; so its
        memory is looked at before the first launch and before the last.
        """
        assert self._pending is not None, "the step was counted"
        misuse, untouched = self._pending.misuse(first, stop)
        if (first == 0 or stop == self.total) and addresses_of(self._state) != self._addresses:
            misuse = REPLACED
        if misuse == REPLACED and self.misuse != REPLACED:
            self.misuse = misuse
            if (optimizer := self._optimizer()) is not None:
                optimizer.damaged = f"{misuse} before a queued step had used it"
        self.misuse = self.misuse or misuse
        return untouched

    def _abandon(self) -> None:
        """Launch nothing more: launches hold addresses, and the memory there may belong to others by now."""
        launches = self._launches
        self._drop()
        self._pending, self.total = None, self.begun
        if launches is not None:
            launches.close()  # brings fetched pages back

    def _carry_out(self, stop: int) -> None:
        """Carry out launches on a CPU; behind the last, write pages back."""
        if os.getpid() != self._process:
            raise RuntimeError("this process was forked while a step was queued: call optimizer.wait() before")
        optimizer = self._optimizer()
        with Uninterrupted(gives_way=True):
            self._look(stop)
            launches = self._launches
            if launches is None:  # they are abandoned, or a signal handler has just carried them out
                return
            written = contextlib.nullcontext() if optimizer is None else whole(optimizer, "a queued step", lambda: True)
            with written:
                try:
                    while self.begun < stop:
                        next(launches)
                        self._let_go(self.begun, self.begun + 1)
                        self.begun += 1
                    if self.begun == self.total:
                        next(launches, None)
                        self._drop()
                except BaseException:
                    self._drop()
                    launches.close()  # brings fetched pages back; now, and not when the traceback is dropped
                    raise

    def _hold(self, side: torch.cuda.Stream, stop: int) -> None:
        """Let the current stream wait for launches, and give back gradients if it is the one that they came from."""
        current = _current(side)
        passed = self._waits.get(current, 0)
        if passed < stop:
            self._look(stop)
            self._events[stop - 1].hold(current)
            self.begun = max(self.begun, stop)
            if current == self._owner.cuda_stream:
                self._let_go(passed, stop)
            self._waits[current] = stop  # last: after an interrupt all of this is done again

    def _let_go(self, first: int, stop: int) -> None:
        """Give back the gradients of launches."""
        if self._pending is not None:
            self._pending.let_go(first, stop)

    def _drop(self) -> None:
        """Give back all that is kept alive."""
        self._launches = self._later = None
        self._updates, self._state = (), []
        self._let_go(0, self.total)


def _launches(updates: Sequence[Work], arenas: Sequence[Arena]) -> Generator[None]:
    """Carry out all updates; yield behind each launch."""
    for update in updates:
        yield from update.passes(arenas)


def _current(side: torch.cuda.Stream) -> int:
    """Return the handle of the current stream on the device of another."""
    return internals.current_stream(side.device_index)
