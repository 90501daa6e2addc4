"""The overlap of one optimizer: which step is queued, who waits for it, and when a step may be queued at all."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from ...system import internals
from ...system.cuda.driver import Event
from ...system.warn import outside
from ..state.rule_optimizer import RuleOptimizer, occurrences
from ..step.launches import Launches, PreparedStep
from ..step.queued import QueuedStep, why_not
from . import hooks
from .record import Record, Recorder

#: Why a step was not queued, where nothing is to be said about it.
_QUIET = ("no page of its state is away",)
#: Kinds of modules that gather parameters themselves.
_REFUSED = ("DataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclass
class OverlapReport:
    """What an overlap has done.

    Attributes:
        hidden: launches (one for each page that is away) that a module within the forward, or its end, waited for.
        waited: launches that were waited for before the forward began, by a fence or by the outermost module.
        plain: steps that were not queued, by reason.
    """

    hidden: int = 0
    waited: int = 0
    plain: Counter[str] = field(default_factory=Counter)


class _Thread(threading.local):
    """The calls of hooked modules that a thread is in, the outermost first, each with a frame that lasts as long."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.nn.Module, FrameType]] = []
        self.recorder: Recorder | None = None
        self.grad = False


class Overlap:
    """See :meth:`~pagedopt.PagedOptimizer.attach`."""

    def __init__(self, optimizer: RuleOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.report = OverlapReport()
        self.record = Record()
        self.queued: QueuedStep | None = None
        self._events: list[Event] = []
        self._handles: list[Any] = []
        self._compiled: list[weakref.ref[torch.nn.Module]] = []
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._thread = _Thread()
        self._record_next, self._seen, self._off, self._unseen = True, False, "", False
        self._last: list[QueuedStep] = []  # one at most: finished if the optimizer goes, or the process ends
        weakref.finalize(optimizer, _finish, self._last)
        hooks.known.add(self)

    # --- models

    def attach(self, model: torch.nn.Module) -> None:
        """Hook all modules of a model."""
        for module in model.modules():
            kind = next((name for c in type(module).__mro__ if (name := c.__name__) in _REFUSED), None)
            if kind is not None:
                raise ValueError(f"attach() does not take a {kind}, which gathers parameters itself; leave it out")
        self._off = ""
        self._models.append(weakref.ref(model))
        for module in model.modules():
            self._handles += hooks.hook(module, self)
        self._wrap_compiled()

    def detach(self) -> None:
        """Take all hooks away."""
        self.wait()
        for handle in self._handles:
            handle.remove()
        for ref in self._compiled:
            if (module := ref()) is not None and isinstance(made := module._compiled_call_impl, hooks.Compiled):
                module._compiled_call_impl = made.call
        self._handles, self._compiled, self._models = [], [], []

    def _wrap_compiled(self) -> None:
        """Stand in for what ``compile()`` of a module has made."""
        for ref in self._models:
            for module in model.modules() if (model := ref()) is not None else ():
                made = module._compiled_call_impl
                if made is not None and not isinstance(made, hooks.Compiled):
                    module._compiled_call_impl = hooks.Compiled(module, self)
                    self._compiled.append(weakref.ref(module))

    # --- calls of modules

    def enter(self, module: torch.nn.Module) -> None:
        """A module is called: wait for the parameters that it is going to read."""
        thread = self._thread
        _drop_those_that_ended(thread)
        if not thread.calls:
            self._begin(thread, module)
        thread.calls.append((module, _frame_of_call()))
        if thread.recorder is not None:
            self.record.enter(module)
        elif not self.record.knows(module):
            self._record_next = self._record_next or thread.grad
            self._finish("waited")
        elif self.queued is not None:
            self._wait_for(_all_of(module) if hooks.is_compiled(module) else self._of(module))

    def leave(self, module: torch.nn.Module) -> None:
        """A call has ended."""
        calls = self._thread.calls
        if any(called is module for called, _ in calls):
            while calls.pop()[0] is not module:
                pass
            if not calls:
                self._end(self._thread)

    def _begin(self, thread: _Thread, module: torch.nn.Module) -> None:
        """The outermost call begins: wait for what no module is known to read."""
        thread.grad = torch.is_grad_enabled()
        if internals.in_fake_mode():
            self._finish("waited")
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured()
        self._wrap_compiled()
        if self.queued is not None and self.record.knows(module):
            known = self.record.first_use
            self._wait_for([p for p in self._params() if id(p) not in known], "waited")
        if self._record_next and thread.grad and not self._off:
            self._finish("waited")
            self._record_next = False
            thread.recorder = Recorder(self._params(), lambda p: self.record.note(thread.calls[-1][0], p))
            thread.recorder.__enter__()

    def _end(self, thread: _Thread) -> None:
        """The outermost call has ended: wait for all that is left."""
        if thread.recorder is not None:
            recorder, thread.recorder = thread.recorder, None
            recorder.__exit__(None, None, None)
            self._order()
        if self.queued is not None:
            self.report.hidden += self.queued.wait_for_all()
        self._seen = self._seen or thread.grad

    def _of(self, module: torch.nn.Module) -> Iterator[torch.Tensor | None]:
        yield from module._parameters.values()
        yield from self.record.read_by(module)

    def _wait_for(self, params: Iterable[torch.Tensor | None], count: str = "hidden") -> None:
        if self.queued is not None:
            more = self.queued.wait_for(params)
            setattr(self.report, count, getattr(self.report, count) + more)

    def _params(self) -> Iterator[torch.Tensor]:
        if (optimizer := self._optimizer()) is not None:
            for _, _, p in occurrences(optimizer):
                yield p

    def _order(self) -> None:
        """Let pages pass in the order in which their parameters are first used."""
        if (optimizer := self._optimizer()) is not None:
            first = self.record.first_use
            order = {i: first.get(id(p), -1) for i, (_, _, p) in enumerate(occurrences(optimizer))}
            if order != optimizer.first_use:
                optimizer.first_use = order
                optimizer.forget_launches()

    # --- fences

    def wait(self) -> None:
        """Wait for the queued step, as everybody does who reads or writes what it changes."""
        self._finish("waited")

    def _finish(self, count: str) -> None:
        queued, self.queued = self.queued, None
        if queued is None:
            return
        if not queued.all_begun and queued.gradients_moved(self._params()):
            self._unseen = True
        try:
            setattr(self.report, count, getattr(self.report, count) + queued.finish())
        finally:
            self._last.clear()

    def traced(self) -> None:
        """A compiler traces hooks; those within a compiled module have been waited for as a whole."""
        calls = self._thread.calls
        if not any(hooks.is_compiled(module) for module, _ in calls):
            self._finish("waited")
            self._turn_off("a compiler has traced the model, and its code calls no hooks")

    def _captured(self) -> None:
        queued, self.queued = self.queued, None
        if queued is not None:
            queued.finish_on_host()
            self._last.clear()
        self._turn_off("the model was captured into a CUDA graph, which calls no hooks")

    def _turn_off(self, why: str) -> None:
        self._off = self._off or why

    # --- steps

    def take(self, step: PreparedStep) -> Launches | None:
        """Take a prepared step: queue it if the forward before it was seen, else carry it out."""
        if self._unseen:
            self._unseen = False
            raise RuntimeError(_UNSEEN)
        why = self._why_plain(step)
        if not why:
            return step.run(self._queue)
        if why not in _QUIET and not self.report.plain[why]:
            warnings.warn(f"this step was not queued: {why}", RuntimeWarning, stacklevel=outside())
        self.report.plain[why] += 1
        self._seen = False
        return step.run()

    def _why_plain(self, step: PreparedStep) -> str:
        if self._off:
            return self._off
        if not self._seen:
            return "no forward of an attached model was seen since the last step"
        after = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_post_hooks", None)
        if after or getattr(step.optimizer, "_optimizer_step_post_hooks", None):
            return "hooks that run behind step() may read parameters"
        return why_not(step)

    def _queue(self, step: PreparedStep) -> None:
        device = step.updates[0].sweep.device
        self._seen = False
        self.queued = QueuedStep(step, _side(device) if device.type == "cuda" else None, self._events)
        self._last.append(self.queued)
        for update in step.updates:
            update.sweep.begun = True  # from now on an error leaves the state damaged
            update.write_numbers()


_UNSEEN = (
    "gradients have come from a forward that attach() did not see, while an update was queued: it read parameters of "
    "before the last step. Code of a compiler, a CUDA graph or m.forward(x) calls no hooks: call optimizer.wait() "
    "before it. This step was not taken"
)
_sides: dict[torch.device, torch.cuda.Stream] = {}


def _side(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of queued steps on a device; optimizers share it."""
    if device not in _sides:
        _sides[device] = torch.cuda.Stream(device)
    return _sides[device]


def _finish(last: list[QueuedStep]) -> None:
    while last:
        last.pop().finish()


def _all_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return module.parameters()


def _frame_of_call() -> FrameType:
    """Return the frame that runs a module's hooks, its forward, and its hooks again."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == hooks.__name__:
        frame = frame.f_back
    return frame


def _drop_those_that_ended(thread: _Thread) -> None:
    """Forget calls that ended without a word: torch does not call hooks behind an interrupt."""
    if not thread.calls:
        return
    frames, frame = set(), sys._getframe(1)
    while (back := frame.f_back) is not None:
        frame = back
        frames.add(id(frame))
        if frame is thread.calls[-1][1]:
            return
    while thread.calls and id(thread.calls[-1][1]) not in frames:
        thread.calls.pop()
    if not thread.calls and thread.recorder is not None:
        recorder, thread.recorder = thread.recorder, None
        recorder.__exit__(None, None, None)
