"""What every paged optimizer shares: a step is one launch per combination of dtypes, over one pointer list."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

import torch

from ..common.units import parse_bytes, text_of_bytes
from ..paging.budget import Budget, Given
from ..placements import choose
from ..placements.choose import StateLost
from ..placements.memory_report import MemoryReport
from ..placements.store import Store
from ..planning.affordable import Affordable
from ..rules import Rule
from ..system.internals import dynamo_is_at_work, opaque
from ..system.log import log
from .loading.copying import bring_home, duplicate, into_pages
from .loading.load import load
from .locks import Turn, in_turn
from .options import Options, complete
from .out_of_memory import advise, is_out_of_memory
from .state.encoding import decoded
from .state.rule_optimizer import Group, RuleOptimizer
from .step.class_checks import check_group, check_initial, check_rules, check_scalars
from .step.launches import NO_SHARDS, Launches, PreparedStep, grads_of_shards, prepare_again, prepare_anew
from .step.members import refuse, state_tensors


@functools.lru_cache(maxsize=256)
def _names(rules: tuple[Rule, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of all state tensors that some rules have, and of numbers."""
    states = frozenset(name for rule in rules for name in rule.inputs[2:])
    return states, frozenset({"step", *(name for rule in rules for name in rule.carried)})


class PagedOptimizer(RuleOptimizer):
    """A ``torch.optim.Optimizer`` made from a rule.

    A subclass names its rule, whose hyperparameters are the group's values by name::

        class SignDescent(PagedOptimizer):
            rule = sign_descent                      # a function decorated with pagedopt.rule
            def __init__(self, params, lr=1e-3, **options):
                super().__init__(params, {"lr": lr}, **options)

    The rule's first input is the parameter, its second the gradient, the others are state, created with zeros (or
    what ``initial`` says) in the first step in which the parameter has a gradient.  A hyperparameter ``step`` is the
    number of the parameter's step, from 1 on; members of a group's tuple ``betas`` are ``beta1``, ``beta2``.  A
    hyperparameter that the rule returns, too, is a number of the parameter's own: a CPU tensor of no dimensions in its
    state, as ``step`` is.

    Args:
        params: parameters or groups, as for any torch optimizer.  Of a ``DTensor`` (FSDP2, tensor parallel) each
            process updates its shard; state is a DTensor, placed as its parameter.
        defaults: hyperparameters of groups that do not set their own.
        options: see :class:`Options`.

    Raises:
        ValueError: an option has an unknown value, a parameter is neither on a CPU nor on a GPU of NVIDIA's, or the
            placement is not for its device; ``initial`` speaks of state that no rule has.
        TypeError: there is no such option, or one has a value of the wrong kind; the class has no rule, or a
            hyperparameter of its one rule is missing.
        RuleError: a rule assigns state and does not return it, does not change its first input, or changes its second.
    """

    @opaque  # what is set in a frame that is traced is lost where the graph breaks
    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        self._configure(options)
        super().__init__(params, defaults)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = opaque(cls.__init__)  # type: ignore[method-assign]

    def _configure(self, options: Options) -> None:
        name, rules = type(self).__name__, self.rules  # who chooses and does not say among which, is checked in a step
        if not self._chooses():
            rules = rules or (getattr(self, "rule", None),)  # type: ignore[assignment]
        check_rules(name, rules)
        self._states, self.numbers = _names(rules)
        if rules:
            check_initial(name, self.initial, self._states | self.numbers - (set() if self.has_step else {"step"}))
        chosen = complete(options, type(self), self._states if rules else None)
        budget, self.affordable = Budget.parse(chosen["device_budget"]), Affordable()
        self.store = Store(chosen["placement"], budget, chosen["host_access"], self.affordable)
        self.state_format, self.blocks = chosen["state_format"], chosen["blocks"]
        self.transport = chosen["transport"]
        self._launches: Launches | None = None
        self._turn = Turn()

    def _chooses(self) -> bool:
        """Whether the rule depends on the group, and so is known in a step only."""
        return type(self).rule_of is not RuleOptimizer.rule_of

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, on the current stream, without waiting for it.

        Args:
            closure: computes the loss again and returns it.

        What it uses is what ``state`` and ``param_groups`` hold now, whoever put it there, and tensors as they are now:
        one that was cast, moved, resized or laid out anew is followed where torch's loop follows it.  Once its first
        launch has begun it is finished and counted, whatever signal arrives; what a handler raises, rises then.  A
        second Ctrl-C ends it in the middle.

        Raises:
            RuntimeError: a gradient is sparse; state is of another dtype, shape or device than the parameter's; a
                parameter is of integers (NotImplementedError), or it or its state has lost its memory, or is a DTensor
                where its gradient or state is none; the stream is being captured into a CUDA graph; the process was
                forked from that of state in a file; state is damaged.  Nothing has been updated then.
            KeyError: state has some of a parameter's tensors and lacks another.  Nothing has been updated then.
            ValueError, TypeError: a gradient is of another shape or device than its parameter or has lost its memory,
                or a parameter is what :meth:`add_param_group` refuses; nothing has been updated then.
            MemoryError, torch.OutOfMemoryError: there is no room for state that is to be made; nothing has been
                updated then.  Or state in a file could not be written back for want of room (on the disk, in a quota,
                in memory): it is damaged.
            OSError: state in a file could not be read or written back: it is damaged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if dynamo_is_at_work():
            self._opaque_step()
        else:
            self._step()
        return loss

    @opaque  # one call for torch.compile; loads nothing that torch's own methods do not load
    def _opaque_step(self) -> None:
        self._step()

    @in_turn
    def _step(self) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() cannot be captured into a CUDA graph: its step count and learning rate "
                "live on the host. Capture the model and step outside of the graph"
            )
        if self.damaged:
            self._check_whole()
        done = None
        while done is None:  # more than once only where others move pages at the same time
            done = self._launches = self._prepare().run()

    def _prepare(self) -> PreparedStep:
        """A step for what state and groups hold now, before it happens."""
        store, changed = self.store, None
        if store.limits.budget.auto:
            with self._moving("device_budget 'auto'"):
                store.remeasure_auto()
        standing, known, found, shards = store.stand(), self._launches, None, NO_SHARDS
        if known is not None and known.residents == standing.residents:
            found = known.watch.look(self)
        if known is None or found is None or known.sharded:
            shards = grads_of_shards(self, known, found)  # once, whatever else differs between processes
        if known is not None and found is not None:
            try:
                return prepare_again(self, known, found, standing, shards)
            except (ValueError, TypeError) as error:  # a tensor is no longer as it was: what is now may do, too
                changed = error.with_traceback(None)
        self._launches = None
        try:
            return prepare_anew(self, shards)
        except Exception as error:
            if changed is not None and str(changed) != str(error):
                error.add_note(f"since the last step: {changed}")
            raise

    def add_param_group(self, param_group: Group) -> None:
        """As torch's.

        Raises:
            TypeError: a parameter is a DTensor of sums that have not been made (``Partial``); a hyperparameter of the
                class's one rule is missing, or no number.
            ValueError: as torch's; state of a complex parameter, or of a DTensor, cannot be stored in the format asked
                for; a parameter is neither on a CPU nor on a GPU of NVIDIA's, or the placement is not for its device.
        """
        super().add_param_group(param_group)
        try:
            refuse(self, self.param_groups[-1], self._states)
            for device in {p.device for p in self.param_groups[-1]["params"]}:
                self.store.check_device(device)
            check_group(type(self).__name__, self.initial, self.param_groups[-1])
            if not self._chooses():
                check_scalars(type(self).__name__, self.rule, self.param_groups[-1], self.defaults)
        except BaseException:
            self.param_groups.pop()
            raise

    @in_turn  # in a step of another thread's it looks damaged
    def _check_whole(self) -> None:
        """
        Raises:
            RuntimeError: state is damaged.
        """
        if self.damaged:
            raise RuntimeError(
                f"the state of this {type(self).__name__} is damaged: {self.damaged}. Some of it belongs to a step "
                "that the rest does not know; load_state_dict() of a checkpoint mends it (load the model's, too)"
            )

    def __repr__(self) -> str:
        text = super().__repr__()
        if (store := vars(self).get("store")) is None:  # shown while it is made
            return text
        report = store.planned(state_tensors(self))
        places = ", ".join(f"{text_of_bytes(nbytes)} on {place}" for place, nbytes in report.by_place.items())
        how = f"placement {report.means}, device_budget {store.budget.shown}"
        return f"{text[:-1]}state: {places or 'none yet'}; {how}\n)"

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """A block in which an out-of-memory error (of a device or of the host) gets a note: what state holds, and what
        a smaller budget frees and costs.  It stays the error that it is.

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
        """A block in which pages may move; ``why`` is said in the log."""
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

    def state_dict(self) -> dict[str, Any]:
        """As torch's; its tensors are those of the optimizer, each with a storage of its own.

        Raises:
            RuntimeError: state is damaged.
        """
        self._check_whole()
        return super().state_dict()

    def decoded_state_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` with all state as plain numbers, for torch's optimizer or another ``state_format``.

        What is stored so already is the optimizer's own; the rest is new, float32 (float64 of such parameters), on the
        parameter's device.

        Raises:
            RuntimeError: state is damaged.
        """
        return decoded(self, self.state_dict())

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of the torch optimizer it stands for, or of a 32-bit one of bitsandbytes.

        Values are copied into existing state tensors where there are any that are stored as the parameter and
        ``state_format`` have it now; placement and budget stay, and neither the dict nor anything of it is kept.  As in
        torch, state of a bfloat16 or float16 parameter is rounded to its dtype, unless ``state_format`` says otherwise.

        Once copying has begun, it ends before a signal is handled; a second Ctrl-C ends it in the middle, and leaves
        the optimizer damaged.  So does a copy that fails (a full disk).

        Raises:
            ValueError: groups, parameters, shapes or names differ, or values in double precision would be rounded to
                float32, which nobody asked for; the optimizer is unchanged then.
            MemoryError, torch.OutOfMemoryError: there is no room for the state; the optimizer is unchanged then.
            RuntimeError: the process was forked from that of state in a file.
        """
        self.store.check_owner()
        load(self, self.store, state_dict, super().load_state_dict)

    @in_turn
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedOptimizer:
        self._check_whole()
        return duplicate(self, memo)

    @in_turn
    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        store = self.store
        options: Options = {
            "state_format": self.state_format,
            "placement": store.placement,
            "device_budget": store.budget.said,
            "host_access": store.host_access,
            "blocks": self.blocks,
            "transport": self.transport,
        }
        return {**super().__getstate__(), "_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if options := state.pop("_options", None):
            self._configure(options)
        super().__setstate__(state)
        self._launches = None
        if options:
            bring_home(self, self.store)

    @in_turn
    def set_device_budget(self, device_budget: Given) -> None:
        """Change how much of the state stays on the device.  Pages move now, at their addresses; waits for the device.

        Args:
            device_budget: as at construction.

        State that nobody placed goes into pages first, as with :meth:`spill`, all of it: the host needs room for that,
        whatever comes back then.  State that was put elsewhere (an entry or tensor of ``state`` replaced) comes home:
        into new tensors, in memory that the budget covers.

        Raises:
            ValueError, TypeError: it is no budget, the placement keeps none, or no rates tell what a time affords.
            MemoryError, torch.OutOfMemoryError: there is no room; no state is lost, and :meth:`memory_report` says
                where each page is.
            RuntimeError: the process was forked from that of state in a file.
        """
        budget, state = Budget.parse(device_budget), state_tensors(self)
        self.store.check_budget(budget, state)
        self._launches = None
        self.store.forget(state)
        del state
        with self._moving(f"set_device_budget({device_budget!r})"):
            if not budget.everything:
                into_pages(self, self.store)
            self.store.set_budget(budget)
            bring_home(self, self.store)

    @in_turn
    def spill(self, nbytes: int | str | None = None) -> int:
        """Give device memory back now, beyond what the budget says, until :meth:`unspill`.  Waits for the device.

        Args:
            nbytes: how much is needed, as a number or a text as ``"2GiB"``; None: all that can be given.

        State for which neither a placement nor a budget was asked lies in torch's own tensors; on a GPU that maps host
        pages that of as many parameters as it takes goes into new tensors in such pages now, and from then on at one
        address back and forth.  A copy of the optimizer (deepcopy, pickle) has it in torch's tensors again.

        Returns:
            the bytes given back: fewer than asked for if the state on the device is less, or does not move.

        Raises:
            MemoryError: the host has no room; what was moved before stays moved.
        """
        wanted = None if nbytes is None else parse_bytes(nbytes, "nbytes")
        with self._moving("spill()"):
            given = self.store.spill(wanted)
            if wanted is None or given < wanted:
                given += into_pages(self, self.store, None if wanted is None else wanted - given)
            return given

    @in_turn
    def unspill(self) -> None:
        """Take the room back that :meth:`spill` gave, as far as the budget says.  Waits for the device.

        Raises:
            torch.OutOfMemoryError: it is no longer there; pages that did not fit stay away.
        """
        with self._moving("unspill()"):
            self.store.apply_budget()

    @contextlib.contextmanager
    def spilled(self, nbytes: int | str | None = None) -> Iterator[int]:
        """A block with room: :meth:`spill` before it, :meth:`unspill` behind it."""
        given = self.spill(nbytes)
        try:
            yield given
        finally:
            self.unspill()

    def memory_report(self) -> MemoryReport:
        """Bytes of state by place, as they should be and as they are (see :class:`MemoryReport`)."""
        return self.store.report(state_tensors(self))
