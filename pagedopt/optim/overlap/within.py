"""The steps of one optimizer within its backwards: hooks of parameters, and what cannot be updated so."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from ...common.patience import Patience
from ...system import internals
from ...system.interrupts import Uninterrupted
from ...tables.tensors import is_sharded
from ..clip import SCALING
from ..plan import NO_SHARDS, Coming, Plan, Step, prepare_anew
from ..rule_optimizer import RuleOptimizer, check_whole, occurrences, whole
from .cycle import Cycle, CyclePlan
from .models import holds_any, refusal
from .side_stream import SideStream

_STEP = "a step within a backward"
_UNDER_THE_FORWARD = "attach(model) hides steps under the next forward instead"
_REDUCES = f"which gathers or reduces after the hooks of parameters; {_UNDER_THE_FORWARD}, where it can"
#: Classes of modules whose gradients are not those that hooks see, and why.
_REFUSED = dict.fromkeys(
    ("DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"), _REDUCES
)
#: Why there is no ``max_grad_norm``.
UNCLIPPABLE = (
    "the norm of all gradients is known after the backward, and this optimizer takes its steps within; detach() it, "
    f"or leave max_grad_norm at None ({_UNDER_THE_FORWARD}, and clips)"
)
_SCALED = (
    "a GradScaler scales the loss, and gradients are used within the backward, before they are unscaled; leave the "
    f"scaler out (bfloat16 needs none), or detach(): {_UNDER_THE_FORWARD}"
)
#: After how many steps whose gradients came in another order pages are put into that, at most.
_MOST_PATIENCE = 64


class Within:
    """See :meth:`~pagedopt.PagedOptimizer.attach`.

    Hooks run in the thread of the backward, which is autograd's own for a GPU; all of them hold the optimizer's lock.
    From the first gradient of a backward to ``step()`` there is a :class:`Cycle`.

    Raises:
        ValueError, TypeError, MemoryError, torch.OutOfMemoryError: see there; nothing has changed.
    """

    def __init__(self, optimizer: RuleOptimizer, model: torch.nn.Module) -> None:
        params = _params(optimizer)
        self._optimizer, self._device = weakref.ref(optimizer), _device_of(optimizer, model, params)
        self._side = SideStream(self._device) if self._device.type == "cuda" else None
        self._launches: Plan | None = None
        self._plan: CyclePlan | None = None
        self._cycle: Cycle | None = None
        self._coming = Coming(frozenset(), {})
        self._made_for: tuple[object, ...] = ()
        #: Parameters that have no state, as they had no gradient in the last step, by id.
        self._idle: frozenset[int] = frozenset()
        #: When gradients are expected, by id.
        self._turns = {id(p): turn for turn, p in enumerate(reversed(params))}
        self._late, self._patience = 0, Patience(_MOST_PATIENCE)
        self._handles: list[Any] = []
        self._hook = _Hook(self)
        weakref.finalize(optimizer, _remove, self._handles).atexit = False
        try:
            optimizer.store.own_rings(True)
            optimizer._plan = None
            step = self._prepare(optimizer)
            self._hook_all(params)
        except BaseException:
            self.detach()
            raise
        optimizer.preallocated.update((m.param, m.entry) for m in step.plan.fresh if m.is_new)
        optimizer.warm = True

    def detach(self) -> None:
        """Take all hooks away, and let the optimizer take plain steps."""
        _remove(self._handles)
        if (optimizer := self._optimizer()) is not None:
            optimizer.store.own_rings(False)
            optimizer._plan = None

    def refuse(self, what: str) -> None:
        """Raise RuntimeError if a backward has begun a step that nobody has ended."""
        if self._cycle is not None:
            raise RuntimeError(
                f"{what}() in the middle of a step: a backward has updated {len(self._cycle.params)} parameters so "
                "far, and step() ends it; call step() before"
            )

    def wait(self) -> None:
        """Let the current stream wait for all updates so far."""
        if self._cycle is not None:
            self._cycle.wait()

    # --- hooks

    def _hook_all(self, params: list[torch.Tensor]) -> None:
        """Hook the parameters that have none of our hooks and can have one."""
        for p in params:
            if self._takes(p) and self._hook not in (hooks := internals.hooks_behind_gradients(p)):
                if any(isinstance(hook, _Hook) and hook.within() is not None for hook in hooks):
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} has another optimizer with overlap='backward', which "
                        "removes its gradient: attach one of them"
                    )
                self._handles.append(p.register_post_accumulate_grad_hook(self._hook))

    def _takes(self, p: torch.Tensor) -> bool:
        return p.requires_grad and p.device == self._device and not is_sharded(p)

    def gradient_came(self, p: torch.Tensor) -> None:
        """Update what has all its gradients now; a parameter's hook."""
        optimizer: Any = self._optimizer()
        if optimizer is None or p.grad is None:
            return
        with optimizer._lock(), Uninterrupted(gives_way=True):
            self._check(optimizer, p)
            if self._cycle is None:
                self._cycle = self._begin(optimizer)
            cycle = self._cycle
            if (grad := cycle.gradient_of(p)) is not None:
                with whole(optimizer, _STEP, cycle.begun):
                    try:
                        cycle.take(p, grad)
                    except BaseException:
                        self._cycle = None
                        cycle.abort()
                        raise

    def _check(self, optimizer: RuleOptimizer, p: torch.Tensor) -> None:
        """Raise RuntimeError if a gradient cannot be used within a backward."""
        cycle, grad = self._cycle, p.grad
        assert grad is not None, "asked before"
        if cycle is not None and id(p) in cycle.params:
            p.grad = None  # what has come twice has no use
            raise RuntimeError(
                f"{_named(optimizer, p)} has a second gradient before step(), and the first has updated it.  "
                "Call step() after each backward, also after one that has failed: it takes the gradients that came.  "
                "To accumulate gradients, detach() and attach(model): overlap='backward' cannot.  A parameter that "
                "several blocks share has one gradient for each if they are checkpointed with use_reentrant=True: take "
                "False"
            )
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {_named(optimizer, p)} is sparse, and {type(optimizer).__name__} does not support "
                "sparse gradients: make the Embedding with sparse=False"
            )
        if grad.requires_grad:
            raise RuntimeError(
                "a backward with create_graph=True: its graph reads parameters that overlap='backward' updates on the "
                "way; leave it out, or detach() the optimizer"
            )
        if not vars(optimizer).keys().isdisjoint(SCALING):
            raise RuntimeError(_SCALED)
        if self._side is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a backward that is captured into a CUDA graph cannot take steps: detach() before")

    def _begin(self, optimizer: RuleOptimizer) -> Cycle:
        """Begin a step: the hyperparameters are those of now."""
        optimizer.check_may_step()
        step = self._prepare(optimizer)
        if self._plan is None or not self._plan.fits(step):
            self._plan = CyclePlan(step, self._coming)
        return Cycle(self._plan, step, self._side)

    def _gradients_to_come(self, optimizer: RuleOptimizer) -> Coming:
        params = _params(optimizer)
        if len({*map(id, params)}) < len(params):
            raise ValueError("a parameter is in the optimizer twice: give each once, or leave out overlap='backward'")
        some = (p for p in params if id(p) not in self._idle or p in optimizer.state)
        turns = {i: self._turns.get(id(p), len(params)) for i, p in enumerate(params)}
        return Coming(frozenset([id(p) for p in some if self._takes(p)]), turns)

    def _prepare(self, optimizer: RuleOptimizer) -> Step:
        """Prepare a step before its gradients are there."""
        store, known = optimizer.store, self._launches
        ready, coming = store.make_ready(), self._gradients_to_come(optimizer)
        made_for = ready.residents, coming.expected, store.rings.get(self._device)  # rows point into its slots
        if known is not None and made_for == self._made_for:
            found = known.seen.compare(optimizer)
            with contextlib.suppress(ValueError, TypeError):  # a parameter has changed
                if found is not None:
                    return known.prepare(optimizer, found, ready)
        self._launches = None
        step = prepare_anew(optimizer, NO_SHARDS, coming)
        self._launches, self._coming = step.plan._replace(fresh=()), coming
        self._made_for = step.ready.residents, coming.expected, store.rings.get(self._device)
        return step

    # --- step()

    def finish(self) -> bool:
        """End the step that a backward has begun.  Return whether it was one and no gradient is left for a plain step.

        Raises:
            RuntimeError: a parameter that was updated has a gradient again; nothing has been done.  A GradScaler has
                scaled the gradients; state is damaged if they were used.  State is damaged: pages are brought back.
            BaseException: something failed, and state is damaged, unless nothing had been updated.
        """
        optimizer: Any = self._optimizer()
        if (cycle := self._cycle) is None:
            self._hook_all(_params(optimizer))  # of which some may be new, or had no gradient to hook so far
            return False
        if optimizer.damaged:  # a second interrupt came while a gradient was taken
            self._cycle = None
            cycle.abort()
            check_whole(optimizer)
        for p in cycle.params.values():
            if p.grad is not None:
                raise RuntimeError(
                    f"{_named(optimizer, p)} was updated within the backward, and has a gradient again, set by hand; "
                    "set it to None"
                )
        with self._on_device(), Uninterrupted(gives_way=True), whole(optimizer, _STEP, cycle.begun):
            self._cycle = None
            try:
                if not vars(optimizer).keys().isdisjoint(SCALING):
                    raise RuntimeError(_SCALED)
                cycle.finish()
            except BaseException:
                cycle.abort()
                raise
        params = _params(optimizer)
        self._idle = frozenset([id(p) for p in params if p not in optimizer.state])
        self._learn_order(cycle)
        self._hook_all(params)
        if any(p.grad is not None for p in params):
            return False
        if optimizer.store.limits.budget.auto:
            with optimizer._moving("device_budget 'auto'"):
                optimizer.store.remeasure_auto()
        return True

    def _learn_order(self, cycle: Cycle) -> None:
        """Expect gradients in the order in which they came, if another one has cost time."""
        if not cycle.late:
            self._patience.served += 1
            return
        self._late += 1
        if self._late >= self._patience.wait and not any(work.launch.counts_anew for work in cycle.step.work):
            self._turns = {name: turn for turn, name in enumerate(cycle.params)}
            self._launches, self._late = None, 0
            self._patience.lost()

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.device(self._device)


class _Hook:
    """The hook of all parameters of an optimizer.  It keeps nothing alive, and torch.compile does not trace it."""

    def __init__(self, within: Within) -> None:
        self.within = weakref.ref(within)

    @internals.opaque
    def __call__(self, p: torch.Tensor) -> None:
        if (within := self.within()) is not None:
            within.gradient_came(p)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _params(optimizer: RuleOptimizer) -> list[torch.Tensor]:
    return [p for _, _, p in occurrences(optimizer)]


def _named(optimizer: RuleOptimizer, p: torch.Tensor) -> str:
    number = next((i for i, each in enumerate(_params(optimizer)) if each is p), "?")
    return f"parameter {number} of shape {tuple(p.shape)}"


def _device_of(optimizer: RuleOptimizer, model: torch.nn.Module, params: list[torch.Tensor]) -> torch.device:
    """Return the device of all parameters.

    Raises:
        ValueError: this optimizer, or this model, cannot take steps within backwards.
    """
    if why := refusal(model, _REFUSED):
        raise ValueError(why)
    if not holds_any(model, optimizer):
        raise ValueError(f"this {type(model).__name__} holds no parameter of this optimizer")
    if any(map(is_sharded, params)):
        raise ValueError(f"a parameter is a DTensor, {_REDUCES}")
    if len(devices := {p.device for p in params}) > 1:
        raise ValueError(
            f"parameters are on {', '.join(sorted(map(str, devices)))}, and overlap='backward' serves one device: make "
            "an optimizer for each"
        )
    for flag in ("fused", "capturable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise ValueError(
                f"a group has {flag}=True, with which steps are counted on the device, and overlap='backward' counts "
                "on the host: leave the flag out (a step is one fused launch anyway)"
            )
    if optimizer.max_grad_norm is not None:
        raise ValueError(f"max_grad_norm is {optimizer.max_grad_norm}: {UNCLIPPABLE}")
    if optimizer.scaled:
        raise ValueError(_SCALED)
    return devices.pop()
