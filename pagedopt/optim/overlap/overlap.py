"""The overlap of one optimizer: which step is queued, who waits for it, and when a step may be queued at all."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...system import internals
from ...system.cuda.driver import Event
from ...system.warn import outside
from ..plan import Plan, Step
from ..rule_optimizer import RuleOptimizer
from ..step.pending import LastLaunches, addresses_in
from ..step.queued import QueuedStep, why_not
from . import everyone, hooks
from .calls import Call, Calls
from .models import Models, holds_any, modules_of, refusal
from .record import OUTSIDE, UNRECORDED, Record, Recorder, Slot, Turns
from .stops import Stop, Stops

#: Why a step was not queued, where nothing is to be said about it.
_QUIET = ("no page of its state is away",)


@dataclass
class OverlapReport:
    """What an overlap has done.

    Attributes:
        hidden: launches (one for each page that is away) that a module within the forward, or its end, waited for.
        waited: launches that were waited for before the forward began, by ``step()``, a fence or the outermost module.
        plain: steps that were not queued, by reason.
        outside: parameters of the last queued step that no attached model holds; ``step()`` has waited for them.
    """

    hidden: int = 0
    waited: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    outside: int = 0


_Counter = Literal["hidden", "waited"]


class Overlap:
    """See :meth:`~pagedopt.PagedOptimizer.attach`."""

    def __init__(self, optimizer: RuleOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer, functools.partial(everyone.wait_if_alive, weakref.ref(self)))
        self.report = OverlapReport()
        self.record = Record()
        self.queued: QueuedStep | None = None
        self._events: list[Event] = []
        self._last: LastLaunches | None = None  # of the last queued step
        self._calls = Calls()
        self._stops = Stops()
        self.models = Models(self)
        self._missed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # outermost, with unrecorded ones inside
        self._seen, self._off = False, ""
        self.misuse = ""  # what was done to a queued step, and nobody was told
        self._turns_of = Turns(self.record)
        self._turns_now: list[int] | None = None  # of the step that goes on, unless its closure runs a forward
        self._first_launches = 0  # of the queued step: those of parameters that no record has seen
        self._before_steps: Any = None

    def attach(self, model: torch.nn.Module) -> None:
        """Hook all modules of a model; ValueError as :meth:`Models.add`."""
        optimizer = self._optimizer()
        self.models.add(model)
        if optimizer is not None and not holds_any(model, optimizer):
            warnings.warn(
                f"this {type(model).__name__} holds no parameter of this optimizer, so its forward hides nothing",
                RuntimeWarning, stacklevel=outside(),
            )  # fmt: skip
        hooks.wrap_compiled(modules_of([model]), self)
        self.record.forget()  # it has not noted who reads parameters of this model
        self._off = ""
        if optimizer is not None and self._before_steps is None:
            self._before_steps = _first_before_steps(optimizer, self)
            hooks.tell_of(self)

    def detach(self) -> None:
        """Take all hooks away."""
        self.wait()
        hooks.unwrap_compiled(self.models.modules(), self)
        self.models.remove_all()
        if self._before_steps is not None:
            self._before_steps.remove()
        self._turn_off("the optimizer was detached")

    # --- calls of modules

    def enter(self, module: torch.nn.Module) -> None:
        """A module is called: wait for the parameters that it is going to read."""
        calls = self._calls
        if (stack := calls.stack) and stack[0].recorder is None:
            stop = self._stops.of(module, stack[0].frame)
            if stop is not None and self._wait_at(stop, module):
                return
        if torch.compiler.is_compiling():  # torch.export
            self.wait()
            return
        calls.forget_ended()
        begins = calls.outermost is None
        if begins:
            self._refuse_early_read(module)
        outermost = calls.push(module)
        if begins:
            self._begin(outermost)
        if outermost.recorder is not None:
            self.record.enter(module)
        elif not self.record.knows(module):
            if outermost.grad:
                self._missed.add(outermost.module)
            self._finish("waited")
        elif hooks.is_compiled(module):
            self._wait_for(module.parameters(), "hidden")
        else:
            launches, last = self._wait_for(self._read_by(module), "hidden")
            if not begins:
                self._stops.note(module, self.record, launches, last, outermost.frame)

    def _wait_at(self, stop: Stop, module: torch.nn.Module) -> bool:
        """Wait where the calls of a module do; return False if its parameters are others, or it is not known where."""
        queued = self.queued
        if queued is None or queued.all_passed:
            return True
        if stop.last is not queued.last or addresses_in(module) != stop.addresses:
            return False
        self._count("hidden", queued.wait_for_first(stop.launches))
        return True

    def leave(self, module: torch.nn.Module, whole: bool = True) -> None:
        """A call has ended; the end of the outermost waits for all that is left."""
        calls = self._calls
        if not (stack := calls.stack):
            return
        outermost, innermost = stack[0], stack[-1]
        recorder = outermost.recorder
        if module is not innermost.module and module is not outermost.module and recorder is None:
            return  # it was not pushed, as its stop was known
        if not calls.pop(module):
            return
        if recorder is not None and whole:
            self.record.ended(module)
        if calls.outermost is not None:
            return
        if recorder is not None:
            recorder.stop()
            self._order(self._turns(self.models.modules()))
        if (queued := self.queued) is not None:
            self._count("hidden", queued.wait_for_all())
        self._seen = self._seen or (whole and outermost.grad and self.models.holds(outermost.module))

    def _refuse_early_read(self, module: torch.nn.Module) -> None:
        """Raise RuntimeError if a method of a module above may have read parameters that are still to be updated.

        A method of a model, other than its call, runs no hook of the model: the first that is called is a child.
        """
        if (queued := self.queued) is None or queued.all_passed or self.models.is_all(module):
            return
        read = (p for above in self.models.above(module) for p in above._parameters.values() if p is not None)
        if (early := next(filter(queued.is_pending, read), None)) is not None:
            name = self.models.name_of(early)
            self._finish("waited")
            raise RuntimeError(
                f"a {type(module).__name__} is called outside of a call of the model that holds it, while {name} of a "
                "module around it is still to be updated: a method may have read that too early. Call "
                "optimizer.wait() before, or attach() only the modules that are called"
            )

    def _begin(self, call: Call) -> None:
        """The outermost call begins: wait for parameters that no module is known to read, or for all; record it."""
        module, self._turns_now = call.module, None
        self._stops.keep_for(self.record)
        call.grad = torch.is_grad_enabled() and not internals.in_fake_mode()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured()
        known = self.record.knows(module) and module not in self._missed
        waits = (queued := self.queued) is not None and not queued.all_passed
        if waits or not known or not internals.in_backward():  # what is computed again there was called before
            modules = self.models.modules()
            hooks.wrap_compiled(modules, self)
        if waits:
            if not self.models.comes_first(module):
                self.misuse = self.misuse or "a hook was put in front of those of attach() and has run"
            self._hook_anew(self.models.unhooked(modules))
            known = known and self.record.knows(module)
        self.models.hook_outermost(module)
        if not known:
            self._finish("waited")
            if call.grad and not self._off:
                self._missed.discard(module)
                call.recorder = Recorder(self.models, call.frame, self._note)
                call.recorder.start()
        elif queued is not None:
            self._count("waited", queued.wait_for_first(self._first_launches))

    def _note(self, slots: list[Slot] | None) -> None:
        """A function of torch was given a parameter, or a tensor whose memory cannot be told, in a recorded call."""
        self._calls.forget_ended()  # of a module that has raised, and whose caller goes on
        if (call := self._calls.innermost) is not None:
            if slots is None:
                self.record.note_any(call.module)
            else:
                self.record.note(call.module, slots)

    def _hook_anew(self, found: list[torch.nn.Module]) -> None:
        """Hook modules that have joined a model, have lost their hooks, or have others in front; wait if there are."""
        if found:
            self._finish("waited")
            self.record.forget()
            if why := next(filter(None, map(refusal, found)), ""):
                self._turn_off(f"a module has joined the model, and {why}")
            else:
                for module in found:
                    self.models.hook(module)

    def _read_by(self, module: torch.nn.Module) -> list[torch.Tensor | None]:
        return [*module._parameters.values(), *self.record.read_by(module)]

    def _wait_for(self, params: Iterable[torch.Tensor | None], counter: _Counter) -> tuple[int, LastLaunches | None]:
        """Wait for the updates of parameters; return how many launches must have begun, and of which launches."""
        if (queued := self.queued) is None:
            return 0, None
        launches = queued.launches_before(params)
        self._count(counter, queued.wait_for_first(launches))
        return launches, queued.last if queued.total else None

    def _count(self, counter: _Counter, launches: int) -> None:
        setattr(self.report, counter, getattr(self.report, counter) + launches)

    def _params(self) -> list[torch.Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def _turns(self, modules: list[torch.nn.Module]) -> list[int]:
        return self._turns_of.turns(modules, self._params())

    def _order(self, turns: list[int]) -> None:
        """Let pages pass in the order in which their parameters are first used; first those that no model holds."""
        if (optimizer := self._optimizer()) is not None:
            order = dict(enumerate(turns))
            if order != optimizer.first_use:
                optimizer.first_use = order
                optimizer._plan = None  # its launches have another order

    def before_step(self, closure: bool) -> None:
        """A step is about to be prepared: wait if hooks of the user run before it, as a ``closure`` does; look anew."""
        optimizer: Any = self._optimizer()
        hooked = len(optimizer._optimizer_step_pre_hooks) > 1 or _global_hooks("pre")
        if self.queued is not None and hooked:
            self.wait()
        if not self._off:
            modules = self.models.modules()
            self._hook_anew(self.models.unhooked(modules))
            turns = self._turns(modules)
            self._order(turns)
            self._turns_now = None if hooked or closure else turns

    # --- fences

    def wait(self) -> None:
        """Wait for the queued step, before anything that it changes is read or written."""
        self._calls.forget_ended()
        self._finish("waited")

    def tell_misuse(self, added: str = "") -> None:
        """Raise RuntimeError, once, if something was done to a queued step that it cannot have taken into account.

        Args:
            added: a further sentence of the text.
        """
        if self.misuse:
            try:
                raise RuntimeError(f"{self._misuse_in_words()}{added}")
            except RuntimeError:
                self.misuse = ""  # not before: an interrupt would leave it untold
                raise

    def end(self) -> None:
        """Wait where nobody could catch an error of the user's, and warn of it: the optimizer or the process ends."""
        self.wait()
        if self.misuse:
            said, self.misuse = self._misuse_in_words(), ""
            warnings.warn(said, RuntimeWarning, stacklevel=outside())

    def _misuse_in_words(self) -> str:
        return f"since the last step, which was queued, {self.misuse} before it was waited for. {_ADVICE}"

    def refuse_copy(self) -> None:
        """Raise RuntimeError if parameters are pending: a copy of the model has read them already."""
        if (queued := self.queued) is not None and not queued.all_begun:
            raise RuntimeError("a copy of a model whose update is queued: call optimizer.wait() before")

    def _finish(self, counter: _Counter) -> None:
        if (queued := self.queued) is not None:
            self._count(counter, queued.finish())
            self._end_of(queued)  # not in a `finally`: after an interrupt the next fence waits for what is left

    def _end_of(self, queued: QueuedStep) -> None:
        """Forget a step that is done, unless another thread has.  After an interrupt all of this is done again."""
        with queued.lock:
            if self.queued is queued:
                self.misuse = self.misuse or queued.misuse
                everyone.with_queued.discard(self)
                self.queued = None

    def traced(self) -> None:
        """A compiler traces hooks; those within a compiled module have been waited for as a whole."""
        if not self._calls.within_compiled():
            self._finish("waited")
            self._turn_off("a compiler has traced the model, and its code calls no hooks")

    def _captured(self) -> None:
        if (queued := self.queued) is not None:
            queued.finish_on_host()
            self._end_of(queued)
        self._turn_off("the model was captured into a CUDA graph, which calls no hooks")

    def _turn_off(self, why: str) -> None:
        self._off = self._off or why

    # --- steps

    def take(self, step: Step) -> Plan:
        """Take a prepared step: queue it if the forward before it was seen, else carry it out."""
        why = self._why_at_once(step)
        if not why:
            self._say_who_is_outside(step.optimizer)
            return step.run(self._queue)
        if why not in _QUIET and not self.report.plain[why]:
            warnings.warn(f"this step was not queued: {why}", RuntimeWarning, stacklevel=outside())
        self.report.plain[why] += 1
        self._seen = False
        return step.run()

    def _why_at_once(self, step: Step) -> str:
        if self._off:
            return self._off
        if not self._seen:
            return _NONE_SEEN
        if getattr(step.optimizer, "_optimizer_step_post_hooks", None) or _global_hooks("post"):
            return "hooks that run behind step() may read parameters"
        return why_not(step)

    def _queue(self, step: Step) -> None:
        self._seen = False
        queued = QueuedStep(step, _side(step.work[0].sweep.device), self._events, self._last)
        with queued.lock:  # fences in other threads wait until it is counted
            self.queued = queued  # before it is launched: whatever is raised, the next fence waits for that
            everyone.with_queued.add(self)
            queued.launch()
            for update in step.work:
                update.sweep.begun = True  # from now on an error leaves the state damaged
                update.write_numbers()
            queued.counted()
            self._last = queued.last
            if self.queued is not queued:
                raise RuntimeError("behind a second Ctrl-C a signal handler has waited for a step that was not counted")
        self._wait_for_outside(queued)

    def _say_who_is_outside(self, optimizer: RuleOptimizer) -> None:
        """Warn once if a step that is about to be queued updates parameters that no attached model holds."""
        turns, count = optimizer.first_use.values(), 0
        if OUTSIDE in turns:
            count = sum(turn == OUTSIDE and p.grad is not None for turn, p in zip(turns, self._params(), strict=False))
        before, self.report.outside = self.report.outside, count
        if count and not before:
            warnings.warn(
                f"{count} of {len(turns)} parameters of the optimizer are in no attached model, and step() waits for "
                "their updates; to hide these, too, attach() the modules that hold them",
                RuntimeWarning,
                stacklevel=outside(),
            )

    def _wait_for_outside(self, queued: QueuedStep) -> None:
        """Wait for parameters that no attached model holds; the model waits for those that no record has seen."""
        known, self._turns_now = self._turns_now, None
        turns = known or self._turns(self.models.modules())

        def taking(which: int) -> list[torch.Tensor]:
            return [p for t, p in zip(turns, self._params(), strict=True) if t == which] if which in turns else []

        self._first_launches = queued.launches_before(taking(UNRECORDED))
        self._count("waited", queued.wait_for(taking(OUTSIDE)))


_NONE_SEEN = (
    "no forward of an attached model was seen since the last step; attach() the modules that are called, for hooks see "
    "no other method of a model"
)
_ADVICE = (
    "Call optimizer.wait() before such a line, and before code of a compiler, a CUDA graph or m.forward(x), which call "
    "no hooks; optimizer.watch_reads() finds the line."
)
_sides: dict[torch.device, torch.cuda.Stream] = {}


def _side(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream of queued steps on a device, which optimizers share; None on a CPU."""
    if device.type == "cpu":
        return None
    if device not in _sides:
        # Of high priority: it shares no hardware queue with the stream of the model, which would else come behind it.
        _sides[device] = torch.cuda.Stream(device, priority=-1)
    return _sides[device]


def _first_before_steps(optimizer: RuleOptimizer, overlap: Overlap) -> Any:
    """Register a hook that runs before all others before ``step()``; return its handle."""
    ref = weakref.ref(overlap)

    def wait(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (alive := ref()) is not None:
            alive.before_step(closure=len(given) > 1 or bool(named))

    handle: Any = optimizer.register_step_pre_hook(wait)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def _global_hooks(when: Literal["pre", "post"]) -> Any:
    """Return the hooks that run before or behind steps of all optimizers."""
    return getattr(sys.modules[torch.optim.Optimizer.__module__], f"_global_optimizer_{when}_hooks", None)
