"""PagedOptimizer, the base class of all optimizers: what users call."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack

import torch

from ..common.names import kind_of
from ..common.units import parse_bytes, text_of_bytes
from ..paging.budget import Budget, Given
from ..placements import choose
from ..placements.memory_report import MemoryReport
from ..placements.store import Store
from ..rules import Rule
from ..system.internals import breaks_graph, dynamo_is_at_work, keep_capturable, opaque
from ..system.interrupts import Uninterrupted
from ..system.warn import StateLost, log
from . import masters, second
from .averaged import Shown
from .capture import Captures
from .class_checks import (
    check_defaults,
    check_group,
    check_group_keys,
    check_initial,
    check_rules,
    check_scalars,
    keys_read,
    warn_of_many,
    warn_of_unread,
)
from .clip import SCALING, note_scaling
from .columns import decoded
from .gather import refuse
from .load import bring_home, duplicate, into_pages, load
from .options import Options, checked_after, complete, documented, drop_formats, rename_rounding
from .overlap import everyone
from .overlap.everyone import wait_for_others
from .overlap.hooks import known
from .overlap.overlap import Overlap, OverlapReport
from .overlap.watch import Watch
from .overlap.within import UNCLIPPABLE, Within
from .plan import NO_SHARDS, Step, grads_of_shards, preallocate, prepare_anew
from .quick import QuickSteps, quick_first
from .room import advise, is_out_of_memory, tell
from .rule_optimizer import Group, OptimizerLock, RuleOptimizer, check_whole, occurrences, state_tensors
from .state_dict import check_is_dict, has_old_codes

#: Changes a new state dict of an optimizer in place, or returns another.
Change = Callable[[RuleOptimizer, dict[str, Any]], dict[str, Any] | None]
#: Methods that are allowed between the first gradient of a backward that updates and ``step()``: they read no state.
MIDWAY = {"_step", "wait", "memory_report"}
Own = TypeVar("Own", bound="PagedOptimizer")
Args = ParamSpec("Args")
Result = TypeVar("Result")


def locked(method: Callable[Concatenate[Own, Args], Result]) -> Callable[Concatenate[Own, Args], Result]:
    """Decorate a method to hold its object's lock while it runs, and to wait for a queued step before.

    It raises RuntimeError in the middle of a step within a backward, unless it is one of :data:`MIDWAY`.
    """
    name = method.__name__
    midway = name in MIDWAY

    @functools.wraps(method)
    def waits(self: Own, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with self._lock.now:
            if self._overlap is not None:
                self._overlap.wait()
            if self._within is not None and not midway:
                self._within.refuse(name.strip("_"))
            return method(self, *args, **kwargs)

    return waits


#: Options that are attributes, which users may set.
_SETTABLE = ("state_format", "rounding", "seed", "blocks", "transport", "preallocate")


@documented
class PagedOptimizer(RuleOptimizer):
    """A ``torch.optim.Optimizer`` made from a rule.

    A subclass sets ``rule``.  The rule's hyperparameters are taken from the parameter group by name::

        class SignDescent(PagedOptimizer):
            rule = sign_descent                      # a function decorated with pagedopt.rule
            def __init__(self, params, lr=1e-3, **options):
                super().__init__(params, {"lr": lr}, **options)

    The rule's inputs are parameter, gradient and state, in this order.  State begins at zero (or as ``initial`` says),
    in the first step in which the parameter has a gradient.  A hyperparameter ``step`` is the parameter's step count,
    from 1 on; ``beta1``, ``beta2`` are the items of a group's tuple ``betas``.  A hyperparameter that the rule also
    returns is a number of the parameter's own: a CPU tensor of no dimensions in its state, like ``step``.

    A default that neither a rule nor ``initial`` reads is refused, unless it is one of torch's flags (``foreach``,
    ``fused``, ``capturable``, ``differentiable``) or an option.  A class keeps more, as for a scheduler or for its own
    ``rule_of``, if it names them: ``extra_defaults = ("momentum",)``.  A class that overrides ``rule_of`` and has no
    ``rules`` is not checked.

    Args:
        params: parameters or groups, as for any torch optimizer.  Of a ``DTensor`` (FSDP2, tensor parallel) each
            process updates its shard; state is a DTensor, placed as its parameter.
        defaults: hyperparameters of groups that do not set their own.
        options: see below.

    Raises:
        ValueError: an option has a bad value; a parameter is neither on a CPU nor on an NVIDIA GPU, or the placement
            does not serve its device; ``initial`` names state that no rule has.
        TypeError: there is no such option, or its value has the wrong type; the class has no rule, a hyperparameter
            of its only rule is missing, or nothing reads a default.
        RuleError: a rule assigns state and does not return it, does not change its first input, or changes its second.
    """

    _lock: OptimizerLock
    _quick: QuickSteps
    _overlap: Overlap | None = None
    _within: Within | None = None
    _captures: Captures

    @opaque  # torch.compile would lose attributes that are set in a traced frame with a graph break
    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        self._configure(options)
        super().__init__(params, defaults)
        if self.known_rules():
            check_defaults(type(self).__name__, defaults, keys_read(self), self._made_with)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = opaque(cls.__init__)  # type: ignore[method-assign]

    def _configure(self, options: Options, restored: bool = False) -> None:
        """Set what options say; those of a pickle (``restored``) may have a budget that is refused today."""
        self.after = checked_after(options)
        name, rules = type(self).__name__, self.known_rules()
        check_rules(name, rules)
        self._states = frozenset(name for rule in rules for name in rule.inputs[2:])
        self.numbers = frozenset({"step", *(name for rule in rules for name in rule.carried)})
        if rules:
            check_initial(name, self.initial, self._states | self.numbers - (set() if self.has_step else {"step"}))
        rename_rounding(options, warn=not restored)
        chosen = self._made_with = complete(options, type(self), self._states if rules else None)
        budget = Budget.parse(chosen["device_budget"])
        if not restored:
            budget.check_unit()
        self.store = Store(chosen["placement"], budget, chosen["host_access"])
        self._lock, self._quick, self._captures, self._plan = OptimizerLock(), QuickSteps(), Captures(), None
        self.factors, self.clipped_by, self.scaled, self.preallocated = {}, {}, False, {}
        self.factors_of_graphs, self.skip_nonfinite = [], chosen["skip_nonfinite"]
        vars(self).update({name: chosen[name] for name in _SETTABLE})  # type: ignore[literal-required]
        self._of_params = chosen["param_format"], chosen["param_rounding"]
        self._has_masters = self.param_format is not None
        self.max_grad_norm = chosen["max_grad_norm"]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, on the current stream, without waiting for the device.

        A step uses ``state`` and ``param_groups`` as they are now, whoever edited them.  It follows tensors that were
        cast, moved, resized or given other strides wherever torch's loop over parameters does.  Once its first launch
        has begun, a step is finished and counted before a signal handler runs.  A second Ctrl-C ends it in the middle.
        One edit goes unseen where a step looks in Python: a state tensor whose ``.data`` becomes a view of itself in
        another layout.

        A step that repeats the last one is one compiled call, unless the environment has ``PAGEDOPT_LOOK=python``.
        In a function that ``torch.compile`` traces it is a graph break; with ``fullgraph=True`` torch raises there.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            AssertionError, TypeError: ``grad_scale`` or ``found_inf`` is set, and a group is not ``fused`` (as torch),
                or it is no tensor of one number.
            RuntimeError: a gradient is sparse; state has another dtype, shape or device than its parameter asks for; a
                parameter has integers (NotImplementedError); a parameter or its state has lost its memory, or is a
                DTensor whose gradient or state is none; the stream is being captured into a CUDA graph and the step
                cannot be (state is not made yet, a group is not capturable, pages pass through slots); the process
                was forked from the one that made state in a file; state is damaged.
            KeyError: state has some of a parameter's tensors and lacks another.
            ValueError, TypeError: a gradient has another shape or device than its parameter or has lost its memory, or
                a parameter is one that :meth:`add_param_group` refuses.
            MemoryError, torch.OutOfMemoryError: there is no room for new state.
            OSError, MemoryError: state in a file could not be read, or could not be written back (MemoryError: no room
                on the disk, in a quota or in memory).  State is damaged; after all other errors nothing is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if dynamo_is_at_work():
            self._step_outside_of_graphs()
        else:
            self._step()
        return loss

    @locked
    def _step(self) -> None:
        if self._within is not None and self._within.finish():
            return
        if self._overlap is not None:
            self._overlap.tell_misuse(" The step that was asked for now was not taken.")
        self.check_may_step()
        if not vars(self).keys().isdisjoint(SCALING):
            note_scaling(self)
        if self._captures.take(self):
            return
        if self._has_masters:
            masters.look_for_writes(self)
        if self._overlap is not None:
            self._overlap.order_pages(self)
        before, step = self._plan, self._prepare()
        if known:
            wait_for_others(step, self._overlap)
        done = self._plan = step.run() if self._overlap is None else self._overlap.take(step)
        if self._has_masters:
            masters.note_versions(self, done=self._overlap is None and self._within is None)
        self.warm = True
        self._quick.after(self, before, done)

    def _patch_step_function(self) -> None:
        """Put torch's hooks around the class's step, as torch does, and the compiled call in front of them."""
        keep_capturable(PagedOptimizer)
        before = type(self).step
        super()._patch_step_function()
        if before is _step and type(self).step is not before:  # not if somebody has replaced it
            type(self).step = quick_first(type(self).step)  # type: ignore[method-assign]

    def _take_quick_step(self) -> bool:
        """Take the step in one compiled call, and return True; or return False, if it is not one that can be."""
        with self._lock.now:
            others = (
                self.damaged or self.shown or self._captures or everyone.with_queued or self._overlap or self._within
            )
            scaled_first = not self.scaled and not vars(self).keys().isdisjoint(SCALING)
            if others or scaled_first:
                return False
            if not self._has_masters:
                return self._quick.take(self)
            masters.look_for_writes(self)
            if taken := self._quick.take(self):
                masters.note_versions(self)
            return taken

    _step_outside_of_graphs = breaks_graph(
        _step, "a step of pagedopt is one launch already, and runs between graphs: leave out fullgraph=True"
    )

    def _prepare(self) -> Step:
        """Prepare a step from state and groups as they are now: all checks and allocations, but no launch."""
        store, changed = self.store, None
        if store.limits.budget.auto:
            with self._moving("device_budget 'auto'"):
                store.remeasure_auto()
        ready, known, found, shards = store.make_ready(), self._plan, None, NO_SHARDS
        if known is not None and (known.factor is None) is (self._max_grad_norm is not None or self.scaled):
            known = None  # multiplies_gradients, written out, was another when the last step began
        if known is not None and known.residents == ready.residents:
            found = known.seen.compare(self)
        if known is None or found is None or known.sharded:
            shards = grads_of_shards(self, known, found)  # collective: every process calls it once in every step
        if known is not None and found is not None:
            try:
                return known.prepare(self, found, ready, shards)
            except (ValueError, TypeError) as error:  # a tensor has changed; preparing anew may accept it
                changed = error.with_traceback(None)
        self._plan = None
        try:
            return prepare_anew(self, shards)
        except Exception as error:
            if changed is not None and str(changed) != str(error):
                error.add_note(f"since the last step: {changed}")
            raise

    @locked
    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as torch does; a group that is refused is not added.

        It may have any keys.  There is a warning, once for each class and key, of one that looks like a mistake.

        Raises:
            TypeError: a parameter is a DTensor of pending sums (``Partial``); a hyperparameter of the class's only rule
                is missing or not a number.
            ValueError: as torch's; ``state_format`` cannot store state of a complex parameter or of a DTensor, or is
                float16 for squares; the group has another value of an option that holds for all parameters; a
                parameter is neither on a CPU nor on an NVIDIA GPU, or the placement does not serve its device.
        """
        name, read = type(self).__name__, keys_read(self)
        if isinstance(param_group, dict):
            rename_rounding(param_group)
            check_group_keys(name, param_group, read, self._made_with)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.after is not None:
            group.setdefault("ema_decay", self.after.decay)
        try:
            refuse(self, group, self._states)
            for device in {p.device for p in group["params"]}:
                self.store.check_device(device)
            check_group(name, self.initial, group)
            if not self.chooses():
                check_scalars(name, self.rule, group, self.defaults)
            warn_of_unread(name, group, {*read, *self.defaults})
            if self.preallocate:
                preallocate(self, len(self.param_groups) - 1)
            warn_of_many(self)
        except BaseException:  # a warning, too, may be an error
            self.param_groups.pop()
            raise

    @locked
    def apply(self, rule: Rule, group: Group) -> None:
        """Apply a rule to the parameters of a group that have state, and to their state, in one launch per dtype.

        Args:
            rule: its inputs are the parameter, then states by name; hyperparameters are the group's.
            group: one of ``param_groups``.

        Raises:
            ValueError: a parameter has no state of that name, or not as plain numbers.
            KeyError, TypeError: the group lacks a hyperparameter, or it is no number.
            RuntimeError: state is damaged; this is within :meth:`averaged`.
        """
        second.apply(self, rule, group)

    def __repr__(self) -> str:
        text = super().__repr__()
        if (store := vars(self).get("store")) is None:  # called from the constructor
            return text
        report = store.planned(state_tensors(self))
        places = ", ".join(f"{text_of_bytes(nbytes)} on {place}" for place, nbytes in report.by_place.items())
        how = f"placement {report.means}, device_budget {store.budget.shown}"
        return f"{text[:-1]}state: {places or 'none yet'}; {how}\n)"

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """A ``with`` block that adds a note to out-of-memory errors (of a device or the host) and raises them again.

        The note says what state holds, and what a smaller budget frees and costs.

        Example:
            >>> with optimizer.guard():
            ...     loss = model(batch).mean()
            ...     loss.backward()
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                advise(error, self)
            raise

    @contextlib.contextmanager
    def _moving(self, why: str) -> Iterator[None]:
        """A ``with`` block in which pages may move.  Moves are logged, with the reason ``why``."""
        self._captures.refuse_moves(why)
        before, begin = [(arena, arena.resident) for arena in self.store.arenas], time.perf_counter()
        places = choose.total([arena.planned() for arena, _ in before]) if log.isEnabledFor(logging.INFO) else {}
        try:
            yield
        except StateLost as error:
            self.damaged = str(error)
            raise
        finally:
            if before != [(arena, arena.resident) for arena in self.store.arenas]:
                self._plan = None
                tell(self, why, places, time.perf_counter() - begin)

    # --- state dicts and copies

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, or what a hook returns.  Tensors are the optimizer's, each with its own storage.

        State in int8 is codes: save them with their strides, as torch.save does.  Any ``state_format`` loads them;
        torch's optimizers raise ``KeyError: 'exp_avg'`` in their step and need :meth:`decoded_state_dict`.

        Raises:
            RuntimeError: state is damaged, or an update was lost (see :meth:`wait`); a backward has begun a step that
                :meth:`step` has not ended.  Loads, copies, moves and new groups raise it, too.
        """
        self._tell_misuse()
        check_whole(self)
        with self._changing(drop_formats):
            return super().state_dict()

    @locked
    def decoded_state_dict(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with all state as plain numbers, for torch's optimizer or any ``state_format``.

        State in a floating-point format is not copied.  Decoded state is new: float32 (or what its format computes in),
        on the host.  Raises RuntimeError if state is damaged.

        Example:
            >>> theirs = torch.optim.AdamW(model.parameters())
            >>> theirs.load_state_dict(optimizer.decoded_state_dict())
        """
        with self._changing(decoded):
            return self.state_dict()

    @contextlib.contextmanager
    def _changing(self, change: Change) -> Iterator[None]:
        """A ``with`` block in which ``change`` alters state dicts before hooks of others see and replace them."""
        changes = [change]  # emptied at the end: an interrupt may leave the hook behind
        hook = self.register_state_dict_post_hook
        try:
            with hook(lambda _, found: changes[0](self, found) if changes else None, prepend=True):
                yield
        finally:
            changes.clear()

    @locked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of the torch optimizer it replaces, or of a 32-bit one of bitsandbytes.

        Values are copied; no reference to the dict's state remains.  Placement, budget and formats of this optimizer
        stay; a group's ``seed`` and ``rounding`` are loaded.  As in torch, state of a bfloat16 or float16 parameter is
        rounded to its dtype, unless ``state_format`` says otherwise.  State in int8 loads into any ``state_format``.

        Entries that wrappers add are loaded as torch loads them: tensors in a parameter's entry go to its device and
        dtype; other objects stay the same objects.

        The first Ctrl-C waits until copying ends.  A second one, or a copy that fails (full disk), leaves the optimizer
        damaged.

        Args:
            state_dict: what :meth:`state_dict` returned, here or in a run before.

        Raises:
            ValueError: groups, parameters, shapes or names differ, or double precision would be rounded to float32
                without a ``state_format`` that asks for it; the optimizer is unchanged.
            MemoryError, torch.OutOfMemoryError: there is no room for the state; the optimizer is unchanged.
            RuntimeError: the process was forked from the one that made state in a file; this is within
                :meth:`averaged`.
        """
        self.store.check_owner()
        check_is_dict(state_dict)
        if self.shown:
            check_whole(self)
        load(self, self.store, state_dict, super().load_state_dict)
        if self._overlap is not None:
            self._overlap.misuse = ""  # the step it was done to is gone
        self.preallocated = {p: entry for p, entry in self.preallocated.items() if p not in self.state}
        self.versions = None  # parameters are loaded, too

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """A ``with`` block in which each parameter has the value of its average; see :func:`pagedopt.ema`.

        They change places in one sweep, without other memory, and back at the end of the block, also behind an
        exception.  A parameter of 16 bits, which would round its average, is copied for the time.  One that was never
        updated stays.  Save the model within the block, the optimizer outside: to step, save, load or copy it, or to
        enter another block, raises RuntimeError.

        Raises:
            RuntimeError: the optimizer has no ``after=pagedopt.ema(decay)``, or is damaged.
            OSError, MemoryError, torch.OutOfMemoryError: as of a step.  At the end of the block the optimizer is then
                damaged; load model and optimizer.

        Example:
            >>> with optimizer.averaged():
            ...     torch.save(model.state_dict(), "average.pt")
        """
        self._averaged()
        try:
            yield
        finally:
            self._averaged(end=True)

    @locked
    def _averaged(self, end: bool = False) -> None:
        if not end:
            if self.after is None:
                raise RuntimeError("there is no average: make the optimizer with after=pagedopt.ema(decay)")
            check_whole(self)
            self.shown = Shown(self)
            return
        shown, self.shown = self.shown, None
        try:
            shown.end(self)
        except BaseException as error:
            self.damaged = self.damaged or f"averaged() failed at its end ({type(error).__name__}: {error})"
            raise

    @locked
    def master(self, p: torch.Tensor) -> torch.Tensor:
        """Return a parameter's float32 values, its additional bits included: a new tensor, in its shape, on its device.

        Without additional bits (``param_format``) these are the parameter's own values, in its dtype if that has 32
        bits or more.  A DTensor has a DTensor.

        Args:
            p: the parameter.

        Raises:
            ValueError: it is no parameter of this optimizer.

        Example:
            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), param_format="bfloat16+16")
            >>> exact = optimizer.master(model.weight)
        """
        return masters.master(self, p)

    @locked
    def master_state_dict(self, named: masters.Named) -> dict[str, torch.Tensor]:
        """Return what :meth:`master` returns of each parameter, by name, copied to the host one by one.

        Args:
            named: names and parameters, as ``model.named_parameters()``; those of no group of this optimizer have
                their own values.

        Raises:
            ValueError: a tensor is no parameter of this optimizer and shares memory with one, as the detached ones of
                ``model.state_dict()`` do.
            TypeError: ``named`` has no names and tensors.

        Example:
            >>> torch.save(optimizer.master_state_dict(model.named_parameters()), "float32.pt")
        """
        return masters.master_state_dict(self, named)

    @locked
    def load_master(self, values: Mapping[str, torch.Tensor], named: masters.Named) -> None:
        """Set parameters, and their additional bits in state, to these float32 values.

        ``"bfloat16+8"`` rounds to nearest.  State of these parameters that is not there yet is made, as by the first
        step.  A parameter that requires no gradient, or has no additional bits, is rounded to its dtype.

        Args:
            values: a floating-point tensor for each name, in the parameter's shape, on any device; of a DTensor one
                that is placed as it is.
            named: names and parameters, as ``model.named_parameters()``; others than those in ``values`` stay.

        Raises:
            ValueError: a name is unknown, its parameter is of no group of this optimizer, or a tensor has another
                shape, no values, or numbers that are not floating-point; nothing is changed.
            TypeError: ``values`` or ``named`` has no names and tensors; nothing is changed.
            MemoryError, torch.OutOfMemoryError: there is no room for new state; nothing is changed.

        Example:
            >>> optimizer.load_master(torch.load("float32.pt"), model.named_parameters())
        """
        masters.load_master(self, values, named)

    @locked
    def reset_master(self, p: torch.Tensor) -> None:
        """Set a parameter's additional bits to zero, for example after other code has written the parameter.

        Args:
            p: the parameter.

        Raises:
            ValueError: it is no parameter of this optimizer.
        """
        masters.reset_master(self, p)

    @locked
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedOptimizer:
        return duplicate(self, memo)

    @locked
    def __getstate__(self) -> dict[str, Any]:
        check_whole(self)
        now: Any = {name: getattr(self, name) for name in (*_SETTABLE, "max_grad_norm")}
        options: Options = {**self._made_with, **now, "device_budget": self.store.budget.said}
        return {**super().__getstate__(), "_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if options := state.pop("_options", None):
            self._configure(options, restored=True)
        super().__setstate__(state)
        self._plan, self._quick = None, QuickSteps(vars(self).get("_quick"))
        for group in self.param_groups:
            rename_rounding(group, warn=False)
        for _, group, p in occurrences(self) if options else ():  # pickled before squares in float16 were refused
            self.check_squares(self.state.get(p) or (), p, group, refuse=False)
        if options and has_old_codes(self):
            self.load_state_dict(self.state_dict())
        if options:
            bring_home(self, self.store)

    # --- room for state

    @locked
    def set_device_budget(self, device_budget: Given) -> None:
        """Change how much of the state stays on the device.  Pages move now, addresses stay; waits for the device.

        If the optimizer had neither placement nor budget, all state first moves into pages, and the host needs room
        for it.

        Args:
            device_budget: as at construction.

        Raises:
            ValueError, TypeError: it is not a budget, or one of so few bytes that a unit was forgotten; the placement
                takes none, or a time is given without rates.
            MemoryError, torch.OutOfMemoryError: there is no room; no state is lost, and :meth:`memory_report` says
                where each page is.
            RuntimeError: the process was forked from the one that made state in a file.
        """
        budget, state = Budget.parse(device_budget), state_tensors(self)
        budget.check_unit()
        self._captures.refuse_moves(f"set_device_budget({device_budget!r})")
        self.store.check_budget(budget, state)
        self._plan = None
        self.store.forget(state)
        del state
        with self._moving(f"set_device_budget({device_budget!r})"):
            if not budget.everything:
                into_pages(self, self.store)
            self.store.set_budget(budget)
            bring_home(self, self.store)

    @locked
    def spill(self, nbytes: int | str | None = None) -> int:
        """Free device memory now, beyond what the budget asks, until :meth:`unspill`.  Waits for the device.

        If the optimizer had neither placement nor budget, as much state as needed moves from torch's own tensors into
        pages, where the GPU supports them.

        Args:
            nbytes: how much to free, a number or a text (``"2GiB"``); None: all that can move.

        Returns:
            the bytes freed: fewer than asked for if less state is on the device, or it does not move.

        Raises:
            MemoryError: the host has no room; pages that have moved stay moved.
        """
        wanted = None if nbytes is None else parse_bytes(nbytes, "nbytes")
        with self._moving("spill()"):
            given = self.store.spill(wanted)
            if wanted is None or given < wanted:
                given += into_pages(self, self.store, None if wanted is None else wanted - given)
            return given

    @locked
    def unspill(self) -> None:
        """Move back what :meth:`spill` freed, as far as the budget allows.  Waits for the device.

        Raises torch.OutOfMemoryError if the device has no room any more; pages that did not fit stay on the host.
        """
        with self._moving("unspill()"):
            self.store.apply_budget()

    @contextlib.contextmanager
    def spilled(self, nbytes: int | str | None = None) -> Iterator[int]:
        """A ``with`` block: :meth:`spill` before it, :meth:`unspill` after it.  Yields the bytes freed.

        Args:
            nbytes: as of :meth:`spill`.
        """
        given = self.spill(nbytes)
        try:
            yield given
        finally:
            self.unspill()

    @locked
    def memory_report(self) -> MemoryReport:
        """Return the bytes of state on device, host and file, planned and measured; moves nothing.

        See :class:`MemoryReport`.
        """
        return self.store.report(state_tensors(self))

    # --- steps under the forward, or within the backward

    @locked
    def attach(self, model: torch.nn.Module, overlap: Literal["forward", "backward"] = "forward") -> None:
        """**Between step() and the next call of the model, weights are old: call wait() before you read them.**

        With ``overlap="forward"``, ``step()`` queues the update and returns.  The update runs under the next forward of
        ``model``; each module waits for its own parameters before it runs.  The result is the same, bit for bit.  It
        has an effect only if some state is off the device, and saves time only on a GPU.

        Call :meth:`wait` before anything else reads or writes parameters, gradients or state.  Methods of this
        optimizer wait by themselves, and so do ``state_dict``, ``to``, ``half`` and ``share_memory`` of the model.
        Reads without autograd and writes through ``.data`` or NumPy are not noticed; other misuse raises in
        :meth:`wait`, in a state dict or in the next step.  :meth:`watch_reads` finds the line; notes/hiding.md has the
        whole list.

        * Attach the modules that you call: ``model.features(x)`` or ``model.forward(x)`` runs no hook of ``model``.
        * Copy batches to the device before the model is called, not within: copies are served in turn.
        * ``torch.cuda.synchronize()`` does not wait for an update that has not started; :meth:`wait` does.
        * A step is not queued if no forward of the model was seen since the last one (``torch.compile``, CUDA graphs),
          if hooks run after it, or if parameters are on several devices.  A warning gives the reason, once.
        * ``step()`` waits, with a warning, for parameters that no attached model has.

        **With overlap="backward" each gradient is used and freed as soon as it is complete**, so not all gradients are
        in memory at once.  The result is the same, bit for bit.  After the backward ``.grad`` is None; ``step()`` ends
        the step.  Hyperparameters are those at the first gradient.  Between backward and ``step()`` call :meth:`wait`
        before you read parameters.  Memory for state is allocated by this call.

        It excludes what needs all gradients first: clipping by a norm, a ``GradScaler``, several backwards for a step,
        reductions over processes.  If a backward raises, ``step()`` ends its step with the gradients that came.  Under
        ``torch.compile`` all hooks run after the whole backward, so no gradient is freed earlier.

        Args:
            model: the module that is called in training.  Under the forward, several may be attached.
            overlap: ``"forward"`` or ``"backward"``; one of them at a time.

        Raises:
            ValueError: ``overlap`` is something else; the model or the optimizer is attached; the model is, or has
                within it, a ``DataParallel``, a scripted module, or one that is sharded by FSDP; no hook has been set.
                With ``"backward"`` also: a ``DistributedDataParallel``; parameters on several devices, or twice in the
                optimizer; ``max_grad_norm`` is set; a group is ``fused`` or ``capturable``; a ``GradScaler`` has scaled
                a step; no parameter of the optimizer is in the model, or one is attached to another optimizer.
            TypeError: the model is no module.
            MemoryError, torch.OutOfMemoryError: with ``"backward"``, there is no room for state.
            RuntimeError: with ``"backward"``, a captured step is alive.

        Example:
            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), device_budget=0)
            >>> optimizer.attach(model)
            >>> for batch in batches:
            ...     loss = model(batch).mean()  # the last update runs here
            ...     loss.backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> with optimizer.waited():  # nothing notices that the average reads the parameters
            ...     average.update_parameters(model)

            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), device_budget=0, state_format="int8")
            >>> optimizer.attach(model, overlap="backward")
            >>> for batch in batches:
            ...     model(batch).mean().backward()  # updates, and leaves no gradient
            ...     optimizer.step()
        """
        if overlap not in ("forward", "backward"):
            raise ValueError(f"overlap is {overlap!r}, and there are 'forward' and 'backward'")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"attach() takes a torch.nn.Module, and not {kind_of(model)}")
        if self._within is not None or (self._overlap is not None and overlap == "backward"):
            under = "forward" if self._within is None else "backward"
            raise ValueError(f"this optimizer is attached with overlap={under!r}; detach() it before")
        if overlap == "backward":
            self._captures.refuse_moves("attach(overlap='backward')")
            with Uninterrupted(gives_way=True):
                self._within, self.unclippable = Within(self, model), UNCLIPPABLE
            return
        overlap_of_all = self._overlap or Overlap(self)
        overlap_of_all.attach(model)
        self._overlap = overlap_of_all

    @locked
    def detach(self) -> None:
        """Undo :meth:`attach`, of all models."""
        within, self._within, self.unclippable = self._within, None, ""
        if within is not None:
            within.detach()
        overlap, self._overlap = self._overlap, None  # first: if an interrupt leaves hooks behind, they are dead
        if overlap is not None:
            overlap.detach()
            self.first_use = {}
            self._plan = None
            overlap.tell_misuse()

    @locked
    def wait(self) -> None:
        """Let the current stream (on a CPU, the caller) wait until the last step is done.

        Call it before you read or write parameters, gradients or state after a step that may be queued; see
        :meth:`attach`.  Without a queued step it does nothing.  Between a backward that updates and :meth:`step` it
        waits for the updates so far.

        Raises:
            RuntimeError: parameters, gradients or state were changed before, without waiting.
        """
        self._tell_misuse()
        if self._within is not None:
            self._within.wait()

    def start(self) -> None:
        """Launch a queued update now, and not with the next call of the model; see :meth:`attach`.

        For a loop in which the host does something slow between :meth:`step` and the next forward, as loading a batch.
        Copy batches before: a copy that comes behind waits for pages.  :meth:`wait` is still to be called before
        anything else reads or writes parameters.  Where no update is queued, and on a CPU, nothing happens.

        Raises:
            SlotsInUse: slots are in the middle of another step.
            CudaError: the driver refuses a launch; if the message says so, state is damaged.

        Example:
            >>> optimizer.step()
            >>> optimizer.start()
            >>> batch = next(batches)
        """
        with self._lock.now:  # not as others, which wait
            if self._overlap is not None and self._overlap.queued is not None:
                self._overlap.queued.start()

    @contextlib.contextmanager
    def waited(self) -> Iterator[None]:
        """A ``with`` block that calls :meth:`wait` first, for code that reads or writes parameters."""
        self.wait()
        yield

    def watch_reads(self) -> Watch:
        """Return a ``with`` block in which a line that forgets :meth:`wait` raises RuntimeError, for tests.

        The message names the line, and the parameter that is read or written while its update is queued, or whose
        gradient is written.  A view (``detach``, ``t``, ``view``) reads nothing.  Kernels that take ``data_ptr()`` and
        other threads are not found.

        Raises:
            RuntimeError: no model is attached.

        Example:
            >>> with optimizer.watch_reads():
            ...     train_an_epoch()
        """
        if self._overlap is None:
            raise RuntimeError("watch_reads() finds who reads parameters too early: attach() a model first")
        return Watch(self._overlap)

    def overlap_report(self) -> OverlapReport:
        """Return, since :meth:`attach`, counts of launches hidden and waited for, and of steps that were not queued.

        All are zero if no model is attached.  It waits for nothing.  See :class:`OverlapReport`.
        """
        return OverlapReport() if self._overlap is None else self._overlap.report

    def _tell_misuse(self) -> None:
        if self._overlap is not None:
            self._overlap.tell_misuse()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        if not set_to_none:  # else a queued step keeps the gradients
            self.wait()
        super().zero_grad(set_to_none)

    # --- steps in CUDA graphs

    @locked
    def refresh(self) -> None:
        """Give captured steps the current gradients, learning rates, clipping norm and other numbers, in stream order.

        Replays queued on the current stream afterwards use them.  Tensors on the device (a learning rate, step counts)
        need no refresh: each replay reads them.

        Raises:
            RuntimeError: no captured step is alive; one is void, as parameters, groups or state were replaced; tables
                are passed by value (``transport="struct"``).
            ValueError, TypeError: a gradient does not fit its parameter, or has another dtype than when captured.

        Example:
            >>> with torch.cuda.graph(graph):
            ...     optimizer.step()
            >>> loss.backward()      # new gradients, somewhere else
            >>> optimizer.refresh()
            >>> graph.replay()
        """
        self._captures.refresh(self)

    @locked
    def check_capture(self) -> None:
        """Check that a replay would do what a step does now.

        Raises:
            RuntimeError: something has changed since the capture, or the last :meth:`refresh`; the message names it.
        """
        self._captures.check(self)


#: As it is defined here.
_step = PagedOptimizer.step
