"""A step in one compiled call, once the same step has been taken before (:mod:`pagedopt.system.look`)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as torch_hooks

from ...common.patience import Patience
from ...placements.ready_arenas import NOTHING_HELD
from ...system import internals
from ...system.cuda import virtual
from ...system.cuda.driver import CudaError, check_code
from ...system.interrupts import Uninterrupted
from ...system.look import words
from ...system.look.parts import Look, compiled_look, is_wanted, pending
from ...system.look.record import ABSENT, Numbers, Record, Row
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead
from .launches import Launches
from .quick_launch import QuickLaunch, QuickNumbers, quick_launch

#: What groups, rules and numbers raise.
_OF_NUMBERS = (ValueError, TypeError, ArithmeticError, RuntimeError, LookupError, AttributeError)
#: The list of gradients in a pointer table.
_GRADS = 1
#: A CPU step over more elements runs the long way, which lets other Python threads run meanwhile.
MAX_ELEMENTS = 1 << 20
#: A step that goes on changing is looked at in Python for at most this many steps before another record is made.
MAX_PATIENCE = 1 << 16
#: Steps after which launches that were none for a look are tried again.
RETRY = 256


class QuickStep:
    """A step of the same launches over the same objects.

    Args:
        optimizer: which has just taken the step.
        known: the record of that step.
        launches: those of its buckets that have a gradient.
        numbers: those of each launch.
        record: what the look compares.
    """

    __slots__ = (
        "_asks", "_forks", "_groups_change", "_groups_hold", "_index", "_known", "_launches", "_numbers", "_on_cpu",
        "_record", "_settings", "_tables", "_threads",
    )  # fmt: skip

    def __init__(
        self,
        optimizer: RuleOptimizer,
        known: Launches,
        launches: Sequence[QuickLaunch],
        numbers: Sequence[QuickNumbers],
        record: Record,
    ) -> None:
        self._known, self._launches, self._numbers, self._record = known, launches, numbers, record
        self._on_cpu, self._threads = launches[0].team is not None, torch.get_num_threads()
        self._index = launches[0].bucket.sweep.device.index
        self._groups_change, self._groups_hold = False, True
        self._forks, self._settings = _forks, _settings(optimizer)
        rule_of, format_of, *_ = self._settings
        depends = not getattr(rule_of, "of_items_alone", False)
        mapping = isinstance(optimizer.state_format, Mapping)  # which may be edited where it is
        self._asks = depends or mapping or format_of is not RuleOptimizer.state_format_of
        self._tables = tuple([launch.bucket.sweep.table for launch in launches])

    @classmethod
    def of(cls, optimizer: RuleOptimizer, known: Launches, look: Look) -> QuickStep | None:
        """Return the quick step of launches that were just taken; None: they need more than a look can do."""
        groups, store = optimizer.param_groups, optimizer.store
        buckets = [bucket for bucket in known.buckets if len(bucket.sweep.table.absent) < bucket.count]
        if any(bucket.sweep.device.type == "cuda" for bucket in buckets) and not look.parts[words.LAUNCH_KERNEL]:
            return None
        launches = [launch for launch in map(quick_launch, buckets) if launch is not None]
        if not launches or len(launches) < len(buckets) or known.sharded or store.limits.budget.auto:
            return None
        if any(group.get("capturable") for group in groups) or len({bucket.sweep.device for bucket in buckets}) > 1:
            return None
        if launches[0].team is not None and sum(sum(bucket.sweep.table.numels) for bucket in buckets) > MAX_ELEMENTS:
            return None
        rows = [ABSENT] * sum(len(group["params"]) for group in groups)
        counted: list[Numbers] = []
        numbers: list[QuickNumbers] = []
        for i, (bucket, its_numbers, *_) in enumerate(launches):
            table = bucket.sweep.table
            here = np.delete(np.arange(bucket.count), table.absent)
            cells, stored = (each[here].tolist() for each in table.words_of_addresses(_GRADS))
            at = table.addresses_of(0)
            for row, cell, copy in zip(here.tolist(), cells, stored, strict=True):
                rows[bucket.positions[row]] = Row(i, at[row], cell, copy)
            numbers.append(QuickNumbers(launches[i], len(counted), here if table.absent else None))
            for state in its_numbers.states:
                if (found := state.addresses()) is None:
                    return None
                addresses, itemsize = found
                counted.append(Numbers(itemsize, addresses[here] if table.absent else addresses))
        try:
            record = Record(
                look, groups, rows, [launch.words for launch in launches], optimizer.state,
                known.objects.names_by_key, counted, store.versions.counters * len(launches),
            )  # fmt: skip
        except TypeError:  # a value, or a class of tensors, that may change while it is the same object
            return None
        if not record.note(groups) or not known.still_hold(optimizer):
            return None
        for launch in launches:
            launch.words.clear()  # they are in the record
        return cls(optimizer, known, launches, numbers, record)

    def prepare(self, optimizer: RuleOptimizer) -> int:
        """Prepare numbers for the step, from today's groups.

        Returns:
            ``DONE``; or why this is no quick step (a number of :mod:`pagedopt.system.look.words`).

        Raises:
            Exception: what groups, rules and numbers raise.
        """
        if not self._still_hold(optimizer):
            return words.ANEW
        if not self._may_run(optimizer):
            return words.PROFILED
        if not self._groups_hold:  # an interrupt came while values were taken
            for each in self._numbers:
                each.forget_groups()
        if (self._asks or not self._groups_hold) and not self._known.objects.same_rules(optimizer):
            return words.ANEW
        self._groups_hold = True
        # Values that have changed before the last step will have now; of others the look finds out.
        if self._groups_change and not self._take_values(optimizer, self._record.take_again):
            return words.ANEW
        return self._prepare_numbers(optimizer)

    def prepare_again(self, optimizer: RuleOptimizer, why: int) -> int:
        """Prepare once more, after a run has found groups or counts to be other ones."""
        if why == words.COUNTS_DIFFER:
            for each in self._numbers:
                each.forget_counts()
        else:
            found = self._record.compare_groups(optimizer.param_groups)
            if found == words.OTHER_ITEMS or not self._take_values(optimizer, self._record.take_groups):
                return words.ANEW
        return self._prepare_numbers(optimizer)

    def _take_values(self, optimizer: RuleOptimizer, take: Callable[[Any], list[tuple[int, str, Any]] | None]) -> bool:
        """Take new values of groups; return False if only a step prepared anew can."""
        self._groups_hold = False
        if (changed := take(optimizer.param_groups)) is None:
            return False
        self._groups_change = bool(changed)
        for each in self._numbers:
            each.take_values(changed)
        self._groups_hold = not changed or self._known.objects.same_rules(optimizer)
        return self._groups_hold

    def _prepare_numbers(self, optimizer: RuleOptimizer) -> int:
        ahead: Ahead = {}
        # Numbers are read from where they were: first see that they are there.
        for each in self._numbers:
            if each.reads and not self._record.same_state(optimizer.state):
                return words.ANEW
            if not each.prepare(optimizer, self._record, ahead):
                return words.ANEW
        return words.DONE

    def run(self, optimizer: RuleOptimizer) -> int:
        """Take the prepared step, if only addresses of gradients are other ones than before.

        Returns:
            a number of :mod:`pagedopt.system.look.words`; if it is not ``DONE``, nothing has happened.

        Raises:
            CudaError, MemoryError: a launch failed behind another one, or in the middle; the optimizer is damaged.
        """
        if self._on_cpu:
            return self._look(optimizer)
        stream = internals.current_stream(self._index)
        buffers = self._borrow(stream)
        found = words.IN_USE
        try:
            found = self._look(optimizer)
        finally:
            for buffer, launch in zip(buffers, self._launches, strict=True):
                if found == words.DONE:
                    buffer.written(launch.bucket.sweep.table.host)
                    buffer.read_on(stream)
                else:
                    buffer.give_back()
        return found

    def _still_hold(self, optimizer: RuleOptimizer) -> bool:
        """Whether settings are what they were when the record was made."""
        if optimizer._launches is not self._known or not self._known.objects.lives or self._forks != _forks:
            return False
        if optimizer._max_grad_norm is not None or optimizer.scaled:  # multiplies_gradients, written out
            return False
        if _settings(optimizer) != self._settings:
            return False
        return not self._on_cpu or torch.get_num_threads() == self._threads

    def _may_run(self, optimizer: RuleOptimizer) -> bool:
        """Whether nothing asks for more than a launch: hooks, modes, captures."""
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return False
        if torch_hooks._global_optimizer_pre_hooks or torch_hooks._global_optimizer_post_hooks:
            return False
        if internals.has_function_modes() and not internals.only_default_devices():
            return False
        if (store := optimizer.store).arenas:
            ready = store.make_ready()
            if ready.residents != self._known.residents or ready.held is not NOTHING_HELD:
                return False
        if self._on_cpu:
            return True
        return internals.current_device() == self._index and not internals.is_capturing() and not virtual.dead

    def _borrow(self, stream: int) -> list[Any]:
        """Return a buffer for each table, and enter them into the record."""
        buffers: list[Any] = []
        for i, launch in enumerate(self._launches):
            host = launch.bucket.sweep.table.host
            buffer = launch.bucket.sweep.transport.borrow(host, stream)
            buffers.append(buffer)
            in_flight = buffer.guarded is not None
            stale = 0 if in_flight else 8 * buffer.stale(host)
            buffer.guarded = stream  # before the launch: an interrupt may come behind it
            self._record.set_launch(i, {
                words.ARGUMENT: buffer.argument, words.STREAM: stream, words.EVENT: buffer.event,
                words.TARGET: buffer.source, words.STALE: stale, words.IN_FLIGHT: in_flight,
            })  # fmt: skip
        return buffers

    def _look(self, optimizer: RuleOptimizer) -> int:
        for table in self._tables:
            if not table.begin_writing():
                return words.ANEW  # an interrupt came behind a look: the long way writes the table again
        found = self._record.look(optimizer.param_groups, optimizer.state)
        for i, table in enumerate(self._tables):
            table.end_writing(self._record.has_moved(i))
            self._numbers[i].looked(found == words.DONE)
            if found == words.DONE:
                self._launches[i].bucket.sweep.launches += 1
        if found >= 2 * words.REFUSED:
            self._fail(optimizer, found - 2 * words.REFUSED)
        if self._on_cpu and found == words.DONE:
            self._check_teams(optimizer)
        return found

    def _fail(self, optimizer: RuleOptimizer, code: int) -> None:
        try:
            check_code("cuLaunchKernel", code)
        except CudaError as error:
            optimizer.damaged = f"a step failed in the middle ({type(error).__name__}: {error})"
            raise

    def _check_teams(self, optimizer: RuleOptimizer) -> None:
        for launch in self._launches:
            if launch.team is not None and launch.team.words[4]:
                try:
                    launch.team.check()
                except MemoryError as error:
                    optimizer.damaged = f"a step failed in the middle ({type(error).__name__}: {error})"
                    raise


def _settings(optimizer: RuleOptimizer) -> tuple[Any, ...]:
    """Return what users may set that decides on rules and formats; attributes may be functions of their own."""
    rule_of, format_of = (
        getattr(optimizer.rule_of, "__func__", None),
        getattr(optimizer.state_format_of, "__func__", None),
    )
    return rule_of, format_of, getattr(optimizer, "rule", None), optimizer.state_format, optimizer.rounding


class QuickSteps:
    """The quick step of an optimizer, made once its steps repeat.

    Args:
        before: those of the optimizer so far, of which only the look that was chosen stays.

    Attributes:
        step: it; None: there is none.
        patience: how many equal steps come before it is made.
    """

    __slots__ = ("_equal", "_wanted", "patience", "step")

    def __init__(self, before: QuickSteps | None = None) -> None:
        self._wanted: bool = is_wanted() if before is None else before._wanted
        self.step: QuickStep | None = None
        self.patience = Patience(MAX_PATIENCE)
        self._equal = 0

    def take(self, optimizer: RuleOptimizer) -> bool:
        """Take a step; return whether it was taken.  Otherwise the optimizer is as it was."""
        if (step := self.step) is None:
            return False
        try:
            found = step.prepare(optimizer)
        except _OF_NUMBERS:
            found = words.ANEW  # of numbers as they were, perhaps; the long way says what is wrong with those of now
        if self.step is not step:  # a signal handler has taken a step
            return False
        if found == words.DONE:
            found = step.run(optimizer)
            if found in (words.GROUPS_DIFFER, words.COUNTS_DIFFER):
                found = self._run_again(step, optimizer, found)
        if found in (words.ANEW, words.CHANGED, words.GROUPS_DIFFER, words.COUNTS_DIFFER):
            self.step, self._equal = None, 0
            self.patience.lost()
        self.patience.served += found == words.DONE
        return found == words.DONE

    def _run_again(self, step: QuickStep, optimizer: RuleOptimizer, why: int) -> int:
        try:
            found = step.prepare_again(optimizer, why)
        except _OF_NUMBERS:
            return words.ANEW
        if self.step is not step:
            return words.PROFILED
        return step.run(optimizer) if found == words.DONE else found

    def after(self, optimizer: RuleOptimizer, before: Launches | None, now: Launches | None) -> None:
        """Note a step that was taken the long way; ``before``: the record of the step before."""
        if now is None or now is not before:
            self.step, self._equal = None, 0
        elif self.step is None and self._wanted:
            self._equal += 1
            if self._equal >= self.patience.wait:
                self._equal = 0
                # The step is done: an error must not come for want of the next one.  A signal is not lost.
                with Uninterrupted(), contextlib.suppress(Exception):
                    if (look := compiled_look()) is not None:
                        self.step = QuickStep.of(optimizer, now, look)
                if self.step is None and not pending():
                    self._equal = -RETRY


def quick_first(hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` with torch's hooks around it, or one compiled call in its place if the step repeats the last."""

    @functools.wraps(hooked)  # which copies torch's mark that there are hooks
    def quick_or_hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        closure = (args and args != (None,)) or (kwargs and kwargs != {"closure": None})
        if internals.dynamo_is_at_work() or closure or self._quick.step is None or not self._take_quick_step():
            return hooked(self, *args, **kwargs)
        return None

    return quick_or_hooked


_forks = 0


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)

__all__ = ["MAX_ELEMENTS", "QuickStep", "QuickSteps", "quick_first"]
