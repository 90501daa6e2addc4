"""The overlap of one optimizer: which step is queued, what each module waits for, and when a step may be queued."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from ...system import internals
from ...system.compare_tensors import identities
from ...system.driver import Event
from ...system.warn import outside
from ..pending import LastLaunches, addresses_in, memory_of
from ..plan import Plan, Step
from ..queue import QueuedStep, why_not
from ..rule_optimizer import RuleOptimizer
from . import everyone, hooks
from .models import called, holds_any, is_compiled, modules_of, refusal
from .record import Recorder, Slot, is_running

#: Turns of parameters that no attached model holds, of those that no record has seen, and no turn.
OUTSIDE, UNRECORDED, _NEVER = -2, -1, sys.maxsize
#: Why a step was not queued, where nothing is to be said about it.
_QUIET = ("no page of its state is off the device",)


@dataclass
class OverlapReport:
    """What an overlap has done.

    Attributes:
        hidden: launches (one for each page off the device) that a module within the forward, or its end, waited for.
        waited: launches that were waited for before the forward began.
        plain: steps that were not queued, by reason.
        outside: parameters of the last queued step that no attached model has; ``step()`` waited for them.
    """

    hidden: int = 0
    waited: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    outside: int = 0


#: For what it is known how many launches a module waits for: steps, its mode, and the addresses of its parameters.
#: Memory that is to be updated is kept alive; so what lies at the address of a parameter is that, or a view of it.
_Need = tuple[LastLaunches | None, bool, list[int] | None]


class _Call(NamedTuple):
    """A call of an attached model: a frame that lasts as long, whether gradients were enabled, and what records it."""

    module: Module
    frame: FrameType
    grad: bool
    recorder: Recorder | None


class _Calls(threading.local):
    """The outermost call of an attached model that goes on in a thread; one may have ended, and nobody has told."""

    now: _Call | None = None


class Overlap:
    """See :meth:`~pagedopt.PagedOptimizer.attach`."""

    def __init__(self, optimizer: RuleOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer, functools.partial(everyone.wait_if_alive, weakref.ref(self)))
        self.report = OverlapReport()
        self.queued: QueuedStep | None = None
        self._events: list[Event] = []
        self._last: LastLaunches | None = None  # of the last queued step
        self._models: WeakKeyDictionary[Module, None] = WeakKeyDictionary()
        self._handles: WeakKeyDictionary[Module, list[Any]] = WeakKeyDictionary()
        #: What a module reads beside its own parameters, by the value of ``training`` with which it was recorded.
        self._reads: WeakKeyDictionary[Module, dict[bool, set[Slot]]] = WeakKeyDictionary()
        self._needs: WeakKeyDictionary[Module, tuple[_Need, int]] = WeakKeyDictionary()
        #: By name of a module's own parameters, in which order they are first used.
        self._uses: WeakKeyDictionary[Module, dict[str, int]] = WeakKeyDictionary()
        self._count_of_uses = itertools.count()
        self._calls = _Calls()
        self._enter, self._begin, self._leave = hooks.Enter(self), hooks.Begin(self), hooks.Leave(self)
        self._fence, self._load = hooks.Fence(self), hooks.Load(self)
        self._seen, self._off = False, ""
        self.misuse = ""  # what was done to a queued step, and nobody was told
        self._turns: tuple[bytes, list[int]] = b"", []  # modules and parameters, and the turns of these
        self._first_launches = 0  # of the queued step: those of parameters that no record has seen
        self._before_steps: Any = None

    # --- models

    def attach(self, model: Module) -> None:
        """Hook all modules of a model.

        Raises:
            ValueError: it cannot be hooked, or is attached; nothing has changed.
        """
        if why := refusal(model):
            raise ValueError(why)
        if model in self._models:
            raise ValueError(f"this {type(model).__name__} is attached")
        self._models[model] = None
        modules = self._unhooked(modules_of([model]))
        try:
            for module in modules:
                self._hook(module)
        except BaseException:
            del self._models[model]
            for module in modules:
                self._unhook(module)
            raise
        optimizer: Any = self._optimizer()
        if optimizer is not None and not holds_any(model, optimizer):
            warnings.warn(
                f"this {type(model).__name__} holds no parameter of this optimizer, so its forward hides nothing",
                RuntimeWarning, stacklevel=outside(),
            )  # fmt: skip
        hooks.wrap_compiled(modules)
        self._forget()  # nobody has noted who reads parameters of this model
        self._off = ""
        if optimizer is not None and self._before_steps is None:
            before = weakref.WeakMethod(self.before_step)
            self._before_steps = optimizer.register_step_pre_hook(lambda *_: (call := before()) and call())
            optimizer._optimizer_step_pre_hooks.move_to_end(self._before_steps.id, last=False)
            hooks.let_apply_wait()
            hooks.known.add(self)

    def detach(self) -> None:
        """Take all hooks away."""
        self.wait()
        for module in list(self._handles):
            self._unhook(module)
        self._models.clear()
        if self._before_steps is not None:
            self._before_steps.remove()
        self._turn_off("the optimizer was detached")

    def _begins(self) -> dict[Module, Any]:
        """Return, by module that may be called as a model, our hook before it."""
        return dict.fromkeys((each for model in self._models for each in called(model)), self._begin)

    def _hook(self, module: Module) -> None:
        """Register all hooks of a module, in front of all others; any that it has are taken away before."""
        self._unhook(module)
        handles, before = self._handles.setdefault(module, []), self._begins().get(module, self._enter)
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        if before is self._begin:  # if compiled, not behind errors: Dynamo guards on such a hook's id, block by block
            always = module._compiled_call_impl is None
            handles.append(module.register_forward_hook(self._leave, always_call=always))
        handles.append(module.register_state_dict_pre_hook(self._fence))
        # Without the module, to which the public function binds it weakly: a shallow copy of a module shares its hooks.
        handles.append(module._register_load_state_dict_pre_hook(self._load, with_module=False))

    def _unhook(self, module: Module) -> None:
        for handle in self._handles.pop(module, ()):
            handle.remove()
        hooks.unwrap_compiled(module)

    def _first_hook(self, module: Module) -> Any:
        """Return the hook that runs first before a module, not counting those of other overlaps."""
        for hook in module._forward_pre_hooks.values():
            if hook is self._enter or hook is self._begin or not isinstance(hook, hooks.Enter):
                return hook
        return None

    def _unhooked(self, modules: Sequence[Module]) -> list[Module]:
        """Return the modules whose hooks are missing, or have others in front."""
        begins = self._begins()
        odd = [m for m in modules if self._first_hook(m) is not begins.get(m, self._enter)]
        return odd + [m for m in begins if m not in odd and self._leave not in m._forward_hooks.values()]

    def _hook_anew(self, modules: Sequence[Module]) -> None:
        """Hook modules that have joined a model, have lost their hooks, or have others in front; wait if there are."""
        if found := self._unhooked(modules):
            self._finish()
            self._forget()
            if why := next(filter(None, map(refusal, found)), ""):
                self._turn_off(f"a module has joined the model, and {why}")
            else:
                for module in found:
                    self._hook(module)

    def _forget(self) -> None:
        """Know no module any more: each is to be recorded anew."""
        self._reads.clear()
        self._needs.clear()

    def name_of(self, param: torch.Tensor) -> str:
        """Return the name of a parameter, or of the parameter that a view shares memory with."""
        memory = memory_of(param)
        named = (each for model in self._models for each in model.named_parameters())
        return next((f"parameter {name!r}" for name, p in named if memory_of(p) == memory), "a parameter")

    # --- calls of modules

    def enter(self, module: Module, frame: FrameType | None = None) -> None:
        """A module within a model is called: wait for the parameters that it is going to read."""
        call, queued = self._calls.now, self.queued
        if call is not None and call.recorder is not None and is_running(call.frame):
            call.recorder.enter(module, frame or sys._getframe(2))
        elif queued is not None and queued.passed < queued.total:
            if call is not None and is_running(call.frame):
                self._wait_for(queued, module, call)
            else:
                self._refuse_early_read(queued, module)
                self._finish()

    def begin(self, module: Module, frame: FrameType) -> None:
        """An attached model is called: wait for what no module is known to read, or for all; record what is not known.

        Args:
            module: the model.
            frame: lasts as long as the call.
        """
        if (call := self._calls.now) is not None:
            if is_running(call.frame):  # a model within another
                self.enter(module, frame)
                return
            self._end(call)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._finish()
            self._turn_off("the model was captured into a CUDA graph, which calls no hooks")
        modules, queued, recorder = modules_of(self._models), self.queued, None
        hooks.wrap_compiled(modules)
        waits = queued if queued is not None and queued.passed < queued.total else None
        if waits is not None:
            if [*self._models] != [module]:
                self._refuse_early_read(waits, module)
            if self._first_hook(module) is not self._begin:
                self.misuse = self.misuse or "a hook was put in front of those of attach() and has run"
            self._hook_anew(modules)
        known = module.training in self._reads.get(module, ())
        grad = torch.is_grad_enabled() and not internals.in_fake_mode()
        if not known:
            self._finish()
            if grad and not self._off:
                recorder = Recorder(modules, module, frame)
        self._calls.now = call = _Call(module, frame, grad, recorder)
        if recorder is not None:
            recorder.start(self._leave)
        elif known and waits is not None:
            self._count("waited", waits.wait_for(self._first_launches))
            self._wait_for(waits, module, call)

    def leave(self, module: Module, frame: FrameType, whole: bool) -> None:
        """A call has ended, ``whole`` unless it has raised; the end of the outermost model's waits for what is left."""
        if (call := self._calls.now) is None:
            return
        if call.recorder is not None:
            call.recorder.leave(module, whole)
        if module is call.module and (frame is call.frame or not is_running(call.frame)):
            self._end(call)
            if (queued := self.queued) is not None:
                self._count("hidden", queued.wait_for())
            self._seen = self._seen or (whole and call.grad)

    def _end(self, call: _Call) -> None:
        """Forget a call that has ended, and keep what its recorder has seen.  After an interrupt all is done again."""
        if (recorder := call.recorder) is not None:
            recorder.stop()
            for ref, name in recorder.order:
                if (owner := ref()) is not None:
                    self._uses.setdefault(owner, {}).setdefault(name, next(self._count_of_uses))
            for module, reads in recorder.reads.items():
                modes = self._reads.setdefault(module, {})
                if module in recorder.ended or module.training in modes:
                    modes[module.training] = reads | modes.get(module.training, set())
            self._needs.clear()
            self._turns = b"", []
        self._calls.now = None

    def _refuse_early_read(self, queued: QueuedStep, module: Module) -> None:
        """Raise RuntimeError if a method of a module above may have read parameters that are still to be updated.

        A method of a model, other than its call, runs no hook of the model: the first that is called is a child.
        """
        above = (m for m in modules_of(self._models) if m is not module and module in modules_of([m]))
        read = (p for m in above for p in m._parameters.values() if p is not None)
        if (early := next(filter(queued.is_pending, read), None)) is not None:
            name = self.name_of(early)
            self._finish()
            raise RuntimeError(
                f"a {type(module).__name__} is called outside of a call of the model that holds it, while {name} of a "
                "module around it is still to be updated: a method may have read that too early. Call "
                "optimizer.wait() before, or attach() only the modules that are called"
            )

    def _wait_for(self, queued: QueuedStep, module: Module, call: _Call) -> None:
        """Wait for what a module reads, or for all if that is not known: then the model's next call is recorded."""
        need = queued.last, module.training, addresses_in(module)
        known = None if module._compiled_call_impl is not None else self._needs.get(module)
        if known is None or known[0] != need:
            others = self._reads.get(module, {}).get(module.training)
            if others is None:
                if call.grad:
                    self._reads.get(call.module, {}).pop(call.module.training, None)
                self._finish()
                return
            own = module.parameters() if is_compiled(module) else module._parameters.values()
            there = [owner._parameters.get(name) for ref, name in others if (owner := ref()) is not None]
            known = need, queued.launches_before([*own, *there])
            if not others and need[2] is not None and not is_compiled(module):
                self._needs[module] = known
        self._count("hidden", queued.wait_for(known[1]))

    def _count(self, counter: Literal["hidden", "waited"], launches: int) -> None:
        setattr(self.report, counter, getattr(self.report, counter) + launches)

    # --- the order of pages

    def _params(self) -> list[torch.Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def _find_turns(self, modules: Sequence[Module]) -> list[int]:
        """Return the turn of each parameter, by first use; OUTSIDE: no module holds it; or UNRECORDED."""
        held, params = [(m, of) for m in modules if (of := m._parameters)], self._params()
        asked = identities((*itertools.chain.from_iterable((m, *of.keys(), *of.values()) for m, of in held), *params))
        known, turns = self._turns
        if asked != known:
            first: dict[int, int] = {}
            for module, of in held:
                uses = self._uses.get(module, {})
                for name, p in of.items():
                    first[id(p)] = min(first.get(id(p), _NEVER), uses.get(name, _NEVER))
            turns = [first.get(id(p), OUTSIDE) for p in params]
            turns = [UNRECORDED if turn == _NEVER else turn for turn in turns]
            self._turns = asked, turns
        return turns

    def before_step(self) -> None:
        """A step is asked for: wait before hooks of the user, which may read parameters; a closure's forward hides."""
        optimizer: Any = self._optimizer()
        if self.queued is not None and (len(optimizer._optimizer_step_pre_hooks) > 1 or _global_hooks("pre")):
            self.wait()

    def order_pages(self, optimizer: RuleOptimizer) -> None:
        """Let pages of the step that is prepared next pass as their parameters are first used; first those outside."""
        if not self._off:
            modules = modules_of(self._models)
            self._hook_anew(modules)
            order = dict(enumerate(self._find_turns(modules)))
            if order != optimizer.first_use:
                optimizer.first_use, optimizer._plan = order, None  # its launches have another order

    # --- fences

    def wait(self) -> None:
        """Wait for the queued step, before anything that it changes is read or written."""
        if (call := self._calls.now) is not None and not is_running(call.frame):
            self._end(call)
        self._finish()

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
        if (queued := self.queued) is not None and queued.begun < queued.total:
            raise RuntimeError("a copy of a model whose update is queued: call optimizer.wait() before")

    def _finish(self) -> None:
        if (queued := self.queued) is not None:
            self._count("waited", queued.finish())
            self._end_of(queued)  # not in a `finally`: after an interrupt the next fence waits for what is left

    def _end_of(self, queued: QueuedStep) -> None:
        """Forget a step that is done, unless another thread has.  After an interrupt all of this is done again."""
        with queued.lock:
            if self.queued is queued:
                self.misuse = self.misuse or queued.misuse
                everyone.with_queued.discard(self)
                self.queued = None

    def traced(self) -> None:
        """A compiler traces hooks; those within a compiled module of ours have been waited for as a whole."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            module = caller.module() if isinstance(caller, hooks.Compiled) else caller
            if (module is not caller or hasattr(caller, "_orig_mod")) and module in self._handles:
                return
            frame = frame.f_back
        self._finish()
        self._turn_off("a compiler has traced the model, and its code calls no hooks")

    def _turn_off(self, why: str) -> None:
        self._off = self._off or why

    # --- steps

    def take(self, step: Step) -> Plan:
        """Take a prepared step: queue it if the forward before it was seen, else carry it out."""
        why = self._off or ("" if self._seen else _NONE_SEEN)
        if not why and (getattr(step.optimizer, "_optimizer_step_post_hooks", None) or _global_hooks("post")):
            why = "hooks that run after step() may read parameters"
        why, self._seen = why or why_not(step), False
        if not why:
            return step.run(self._queue)
        if why not in _QUIET and not self.report.plain[why]:
            warnings.warn(f"this step was not queued: {why}", RuntimeWarning, stacklevel=outside())
        self.report.plain[why] += 1
        return step.run()

    def _queue(self, step: Step) -> None:
        turns, params = [*step.optimizer.first_use.values()], self._params()
        unrecorded, elsewhere = (
            [p for t, p in zip(turns, params, strict=True) if t == turn] for turn in (UNRECORDED, OUTSIDE)
        )
        count = sum(p.grad is not None for p in elsewhere)
        before, self.report.outside = self.report.outside, count
        if count and not before:
            warnings.warn(
                f"{count} of {len(turns)} parameters of the optimizer are in no attached model, and step() waits for "
                "their updates; to hide these, too, attach() the modules that hold them",
                RuntimeWarning, stacklevel=outside(),
            )  # fmt: skip
        queued = QueuedStep(step.optimizer, _side(step.work[0].launch.sweep.device), self._events, self._last)
        with queued.lock:  # fences in other threads wait until it is counted
            self.queued = queued  # before it is launched: whatever is raised, the next fence waits for that
            everyone.with_queued.add(self)
            queued.launch(step)
            self._last = queued.last
            if self.queued is not queued:
                raise RuntimeError("after a second Ctrl-C a signal handler has waited for a step that was not counted")
        self._first_launches = queued.launches_before(unrecorded)
        if elsewhere:
            self._count("waited", queued.wait_for(queued.launches_before(elsewhere)))


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
    if device.type != "cpu" and device not in _sides:
        # Of high priority: it shares no hardware queue with the stream of the model, which would else come behind it.
        _sides[device] = torch.cuda.Stream(device, priority=-1)
    return _sides.get(device)


def _global_hooks(when: Literal["pre", "post"]) -> Any:
    """Return the hooks that run before or behind steps of all optimizers."""
    return getattr(sys.modules[torch.optim.Optimizer.__module__], f"_global_optimizer_{when}_hooks", None)
