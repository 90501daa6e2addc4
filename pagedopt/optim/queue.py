"""A step that is queued: launches that its parameters' readers wait for, one after the other."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from ..launch.on_device import DeviceStep
from ..placements.arena import Arena
from ..system import internals
from ..system.driver import Event, relaxed_capture
from ..system.interrupts import Uninterrupted
from .launch import Work
from .pages import StagedGraph
from .pending import REPLACED, LastLaunches, Pending, cannot_be_told, memory_of
from .plan import Step
from .rule_optimizer import RuleOptimizer, whole


def why_not(step: Step) -> str:
    """Return why a step cannot be queued, or ""."""
    works = step.work
    if not any(work.launch.route is not None for work in works):
        return "no page of its state is off the device"
    transports = [work.launch.sweep.transport for work in works if work.launch.sweep.device.type == "cuda"]
    if any(isinstance(each, DeviceStep) and each.reads_hyperparameters for each in transports):
        return "a hyperparameter is a tensor that the device reads"
    if not all(work.launch.lists.as_they_are for work in works):
        return "parameters or state are complex, DTensors, or have gaps or other strides"
    if any(torch.is_inference(t) for work in works for t in work.seen if t is not None):
        return "parameters or gradients are tensors of torch.inference_mode, which count no writes"
    if len({work.launch.sweep.device for work in works}) > 1:
        return "parameters are on several devices"
    return ""


_NOTHING = Pending(LastLaunches((), (), ()), (), ())


class QueuedStep:
    """A step that is counted when it is launched, and whose launches are pending.

    On a CPU a launch is carried out when somebody waits for a parameter that it, or one behind it, updates.  On a GPU
    all launches are in a stream of their own, each with an event behind it, and who waits is the current stream.  What
    is a CUDA graph is launched when the model's next forward begins, or somebody waits.  The driver mostly serves
    copies to the device first come, first served, even across streams.  So a batch that is copied behind ``step()``
    would come behind all pages of a graph that is launched there, and the forward with it.

    The caller calls :meth:`launch`.  Behind that there is something to wait for.  After an error or an interrupt
    :meth:`finish` may be called again: it waits for what is left.

    Args:
        optimizer: whose step it is.
        side: the stream of the launches; None on a CPU, where fences carry them out.
        spare: events of earlier steps, to be used again; the list grows as needed.
        last: :attr:`last` of an earlier step.

    Attributes:
        side: see above.
        last: which launch is the last one for each parameter; known once the step is queued.
        begun: how many launches somebody has waited for, or has carried out.
        total: the number of launches that can be waited for: all of them, or none until the step is counted.
        misuse: what was done, before its launch, to a parameter or gradient of this step; or "".
        lock: a reentrant one, for all that may not happen in two threads at once.
    """

    def __init__(
        self, optimizer: RuleOptimizer, side: torch.cuda.Stream | None, spare: list[Event], last: LastLaunches | None
    ) -> None:
        self._optimizer, self.last = weakref.ref(optimizer), last
        self._arenas: Sequence[Arena] = ()
        self._pending = _NOTHING  # until the step is counted
        self.begun, self.total, self.misuse = 0, 0, ""
        self.lock, self._process = threading.RLock(), os.getpid()
        self._looked = 0  # launches before which _look() has looked
        self._dropped = False
        self._launches: Generator[None] | None = None  # that fences carry out on a CPU
        self.side, self._spare, self._events = side, spare, list[Event]()
        if side is not None:
            self._owner = torch.cuda.current_stream(side.device)
        self._waits: dict[int, int] = {}  # by stream: launches that it has waited for
        self._later: list[tuple[Work, StagedGraph | None]] = []  # is still to be launched

    def launch(self, step: Step) -> None:
        """Get all launches ready, and count the step; on a GPU, queue them if they are not to be graphs.

        After an error the current stream waits for those that were queued.

        Args:
            step: its checks are done; see :func:`why_not`.
        """
        works, side, before = step.work, self.side, self.last
        self._arenas = step.ready.arenas
        try:
            if side is not None:
                side.wait_stream(self._owner)
            with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
                later = [(work, work.graph(self._arenas)) for work in works]  # whose slots and tables belong to it
            rows = [work.rows_by_launch(whole=graph is not None) for work, graph in later]
            self.last = last = LastLaunches.of(works, rows, before)
            if side is None:
                self._launches = _launches(works, self._arenas)
            else:
                if last is not before:
                    last.keep_memory_for(side, works)
                self._later = later
                if any(graph is None and work.launch.route is not None for work, graph in later):
                    self._launch_on(side)
            for work in works:
                work.launch.sweep.begun = True  # from now on an error leaves the state damaged
                work.write_numbers()
            # Parameters and gradients as they are now, that the step is counted; fences wait from now on.
            pending = Pending(last, works, step.optimizer.store.versions.counters)
            self._pending, self.total = pending, last.total
        except BaseException:
            self.finish()
            raise

    def start(self) -> None:
        """On a GPU, launch what :meth:`launch` has left for later, behind what the gradients' stream was given by then.

        Raises:
            SlotsInUse, CudaError: nothing was launched, and the next fence tries again; or state is damaged.
        """
        if (side := self.side) is None or not self.total or not self._later:  # of what is counted, some is left
            return
        with self.lock, Uninterrupted(gives_way=True):
            self._look(self.total, ahead=True)
            with self._written(lambda: not self._later):
                self._launch_on(side)

    def _launch_on(self, side: torch.cuda.Stream) -> None:
        """Queue all launches on a stream, each with an event behind it."""
        later, events, spare = list[tuple[Work, StagedGraph | None]](), list[Event](), self._spare
        for work, _ in self._later:
            work.launch.sweep.begun = False
        try:
            later, self._later = self._later, []
            if not later:  # a signal handler has just waited for it
                return
            for work, _ in later:
                work.check_slots()  # of all, before the first is launched
            with torch.cuda.stream(side):
                for work, graph in later:
                    if graph is not None and work.launch_graph(graph):
                        events += graph.fences
                        continue
                    with contextlib.closing(work.passes(self._arenas, whole=graph is not None)) as launches:
                        for _ in launches:  # to close it brings fetched pages back
                            spare += [Event(side.device_index) for _ in range(len(spare), len(events) + 1)]
                            events.append(spare[len(events)])
                            events[-1].record(side.cuda_stream)
            if self._dropped:
                raise RuntimeError("a signal handler has waited for a step that was being launched")
            self._events = events
        except BaseException:
            if not self._dropped and not any(work.launch.sweep.begun for work, _ in later):
                self._later = later or self._later
            elif not torch.cuda.is_current_stream_capturing():
                self._join(side)
            for work, _ in later if self._pending is not _NOTHING else ():
                # The step is counted: where step() itself has come here, state is damaged.
                work.launch.sweep.begun = True
            raise

    @property
    def passed(self) -> int:
        """How many launches the caller (on a GPU, the current stream) has waited for."""
        return self.begun if self.side is None else self._waits.get(internals.current_stream(self.side.device_index), 0)

    def launch_of(self, tensor: torch.Tensor | None) -> int:
        """Return the number of the last launch that updates memory of a tensor; -1 if none does."""
        return -1 if tensor is None else self._pending.launch_of.get(memory_of(tensor), -1)

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the memory of a parameter for whose update its reader has not waited."""
        return self.launch_of(tensor) >= self.passed

    def reads_gradient(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the memory of a gradient that is still to be read."""
        return self._pending.reads_gradient(memory_of(tensor), self.passed)

    def launches_before(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Return how many launches must have begun before a reader of tensors goes on; all, if a memory is unknown."""
        count = 0
        for tensor in tensors:
            if (launch := self.launch_of(tensor)) >= count:
                count = launch + 1
            elif launch < 0 and tensor is not None and cannot_be_told(tensor):
                return self.total
        return count

    def wait_for(self, launches: int = sys.maxsize) -> int:
        """Start, and wait for this many launches, or for all; return how many more have begun."""
        with self.lock:
            before = self.begun
            self.start()
            launches = min(launches, self.total)
            if self.side is not None:
                self._hold(self.side, launches)
            elif self._launches is not None and launches > before:
                self._carry_out(launches)
            return self.begun - before

    def finish(self) -> int:
        """Wait for all updates, and until every page is back; return how many more launches have begun."""
        with self.lock:
            before, side = self.begun, self.side
            if side is None:
                self.wait_for()
            elif not torch.cuda.is_current_stream_capturing():
                self.wait_for()
                self._join(side)
            else:  # the stream cannot wait for another: the host does
                with relaxed_capture():  # else CUDA allows no wait while any stream is captured
                    self.start()
                    self._look(self.total)
                    side.synchronize()
                self.begun = self.total
            self._drop()
            return self.begun - before

    def _join(self, side: torch.cuda.Stream) -> None:
        torch.cuda.current_stream(side.device).wait_stream(side)
        self._owner.wait_stream(side)  # gradients go back to it

    def _look(self, stop: int, ahead: bool = False) -> None:
        """Note what was done to parameters, gradients and state before the first launches.

        If memory was replaced, state is damaged, as the step was counted; and what is not launched yet never is.
        Else raise the versions of the other parameters: if one was read too early and autograd has saved it, the
        backward raises RuntimeError.

        Args:
            stop: the number of launches.
            ahead: only look; nobody waits for them yet.
        """
        if stop <= self._looked:
            return
        misuse, untouched = self._pending.misuse(self._looked, stop)
        if misuse == REPLACED and self.misuse != REPLACED:
            self.misuse = misuse
            if (optimizer := self._optimizer()) is not None:
                optimizer.damaged = f"{misuse} before a queued step had used it"
        self.misuse = self.misuse or misuse
        if self.misuse == REPLACED and (ahead or self.side is None):
            self._abandon()
        elif not ahead:
            self._looked = stop  # not before, for an interrupt would lose misuse; nor later: our own would be misuse
            torch.autograd.graph.increment_version(untouched)

    def _written(self, begun: Callable[[], bool]) -> contextlib.AbstractContextManager[object]:
        optimizer = self._optimizer()
        return contextlib.nullcontext() if optimizer is None else whole(optimizer, "a queued step", begun)

    def _carry_out(self, stop: int) -> None:
        """Carry out launches on a CPU; behind the last, write pages back."""
        if os.getpid() != self._process:
            raise RuntimeError("this process was forked while a step was queued: call optimizer.wait() before")
        with Uninterrupted(gives_way=True):
            self._look(stop)
            if (launches := self._launches) is None:  # abandoned, or a signal handler has just carried them out
                return
            with self._written(lambda: True):
                try:
                    while self.begun < stop:
                        next(launches)
                        self._pending.let_go(self.begun, self.begun + 1)
                        self.begun += 1
                    if self.begun == self.total:
                        next(launches, None)
                        self._drop()
                except BaseException:
                    self._drop()
                    raise

    def _hold(self, side: torch.cuda.Stream, stop: int) -> None:
        """Let the current stream wait for launches, and give back gradients if it is the one that they came from."""
        current = internals.current_stream(side.device_index)
        passed = self._waits.get(current, 0)
        if passed < stop and self._events:  # there are none behind an error
            self._look(stop)
            self._events[stop - 1].hold(current)
            self.begun = max(self.begun, stop)
            if current == self._owner.cuda_stream:
                self._pending.let_go(passed, stop)
            self._waits[current] = stop  # last: after an interrupt all of this is done again

    def _drop(self) -> None:
        """Give back all that is kept alive."""
        launches, self._launches, self._later, self._dropped = self._launches, None, [], True
        self._pending.let_go(0, self._pending.last.total)
        self._pending.state.clear()
        if launches is not None:
            launches.close()  # brings fetched pages back; now, and not when a traceback is dropped

    def _abandon(self) -> None:
        """Launch nothing more: launches hold addresses, and the memory there may belong to others by now."""
        self._drop()
        self._pending, self.total = _NOTHING, self.begun


def _launches(works: Sequence[Work], arenas: Sequence[Arena]) -> Generator[None]:
    """Carry out all updates; yield behind each launch."""
    for work in works:
        yield from work.passes(arenas)
