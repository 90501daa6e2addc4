"""PagedOptimizer, the base class of all optimizers: step, state dicts, copies, and moving state between memories."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

import torch

from ..common.units import parse_bytes, text_of_bytes
from ..paging.budget import Budget, Given
from ..placements import choose
from ..placements.memory_report import MemoryReport
from ..placements.store import Store
from ..system.internals import breaks_graph, dynamo_is_at_work, keep_capturable, opaque
from ..system.log import log
from ..system.state_lost import StateLost
from .keys import check_defaults, check_group_keys, keys_read, warn_of_unread
from .loading.check import has_old_codes
from .loading.copying import bring_home, duplicate, into_pages
from .locks import OptimizerLock, locked
from .many import warn_of_many
from .masters import MasterOptimizer
from .options import Options, complete, documented
from .out_of_memory import advise, is_out_of_memory
from .overlap import everyone
from .state.group_options import rename_rounding
from .state.rule_optimizer import Group, occurrences
from .step.class_checks import check_group, check_initial, check_rules, check_scalars
from .step.factor import SCALING, note_scaling
from .step.launches import NO_SHARDS, Launches, PreparedStep, grads_of_shards, prepare_again, prepare_anew
from .step.members import refuse, state_tensors
from .step.preallocate import preallocate
from .step.quick import QuickSteps, quick_first

#: Options that are attributes, which users may set.
_SETTABLE = ("state_format", "rounding", "seed", "blocks", "transport", "preallocate", "max_grad_norm")


@documented
class PagedOptimizer(MasterOptimizer):
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
        self.state_format, self.rounding, self.seed = chosen["state_format"], chosen["rounding"], chosen["seed"]
        self.param_format, self.param_rounding = chosen["param_format"], chosen["param_rounding"]
        self.blocks, self.transport = chosen["blocks"], chosen["transport"]
        self.max_grad_norm, self.factors, self.clipped_by, self.scaled = chosen["max_grad_norm"], {}, {}, False
        self._launches: Launches | None = None
        self._captures, self.preallocated, self.preallocate = [], {}, chosen["preallocate"]
        self._lock, self._quick = OptimizerLock(), QuickSteps()

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
        if self.damaged:
            self._check_whole()
        if self._captured():
            return
        before = self._launches
        self._look_for_writes()
        done = self._launches = self._take(self._prepare())
        self._note_versions()
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
        with self._lock():
            others = self.damaged or self._captures or everyone.with_queued or self._overlap or self._within
            scaled_first = not self.scaled and not vars(self).keys().isdisjoint(SCALING)
            if others or scaled_first:
                return False
            self._look_for_writes()
            if taken := self._quick.take(self):
                self._note_versions()
            return taken

    _step_outside_of_graphs = breaks_graph(
        _step, "a step of pagedopt is one launch already, and runs between graphs: leave out fullgraph=True"
    )

    def _prepare(self) -> PreparedStep:
        """Prepare a step from state and groups as they are now: all checks and allocations, but no launch."""
        store, changed = self.store, None
        if store.limits.budget.auto:
            with self._moving("device_budget 'auto'"):
                store.remeasure_auto()
        if not vars(self).keys().isdisjoint(SCALING):
            note_scaling(self)
        ready, known, found, shards = store.make_ready(), self._launches, None, NO_SHARDS
        if known is not None and (known.factor is None) is (self._max_grad_norm is not None or self.scaled):
            known = None  # multiplies_gradients, written out, was another when the last step began
        if known is not None and known.residents == ready.residents:
            found = known.seen.compare(self)
        if known is None or found is None or known.sharded:
            shards = grads_of_shards(self, known, found)  # collective: every process calls it once in every step
        if known is not None and found is not None:
            try:
                return prepare_again(self, known, found, ready, shards)
            except (ValueError, TypeError) as error:  # a tensor has changed; preparing anew may accept it
                changed = error.with_traceback(None)
        self._launches = None
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
        except BaseException:
            self.param_groups.pop()
            raise
        warn_of_many(self)

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
            ...     loss = model(batch)
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
        self._refuse_moves(why)
        before, begin = [(arena, arena.resident) for arena in self.store.arenas], time.perf_counter()
        places = choose.total([arena.planned() for arena, _ in before]) if log.isEnabledFor(logging.INFO) else {}
        try:
            yield
        except StateLost as error:
            self.damaged = str(error)
            raise
        finally:
            if before != [(arena, arena.resident) for arena in self.store.arenas]:
                self._launches = None
                from .step.budget_advice import tell

                tell(self, why, places, time.perf_counter() - begin)

    @locked
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedOptimizer:
        return duplicate(self, memo)

    @locked
    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        now: Any = {name: getattr(self, name) for name in _SETTABLE}
        options: Options = {**self._made_with, **now, "device_budget": self.store.budget.said}
        return {**super().__getstate__(), "_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if options := state.pop("_options", None):
            self._configure(options, restored=True)
        super().__setstate__(state)
        self._launches, self._quick = None, QuickSteps(vars(self).get("_quick"))
        for group in self.param_groups:
            rename_rounding(group, warn=False)
        for _, group, p in occurrences(self) if options else ():  # pickled before squares in float16 were refused
            self.check_squares(self.state.get(p) or (), p, group, refuse=False)
        if options and has_old_codes(self):
            self.load_state_dict(self.state_dict())
        if options:
            bring_home(self, self.store)

    @locked
    def set_device_budget(self, device_budget: Given) -> None:
        """Change how much of the state stays on the device.  Pages move now, at their addresses; waits for the device.

        State of an optimizer without placement and budget first goes into pages, as with :meth:`spill`, but all of it:
        the host needs room for all state, even if most comes back.  State tensors that users have replaced move into
        new tensors in memory that the budget covers.

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
        self._refuse_moves(f"set_device_budget({device_budget!r})")
        self.store.check_budget(budget, state)
        self._launches = None
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

        Without placement and budget, state lies in torch's own tensors.  The state of as many parameters as needed then
        goes into new tensors in pages, unless a GPU supports none; later moves do not change their addresses.
        A copy of the optimizer (deepcopy, pickle) has that state in torch's tensors again.

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
        """Move back what :meth:`spill` sent away, as far as the budget allows.  Waits for the device.

        Raises torch.OutOfMemoryError if the device has no room any more; pages that did not fit stay away.
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


#: As it is defined here.
_step = PagedOptimizer.step
