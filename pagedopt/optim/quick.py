"""A step in one compiled call (:mod:`pagedopt.system.look`), once the same step has been taken before."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as torch_hooks

from ..common.patience import Patience
from ..kernels import cpu, cuda
from ..launch.on_device import Factor
from ..launch.sums import total_at
from ..system import internals, virtual
from ..system.driver import CudaError, check_code
from ..system.interrupts import Uninterrupted
from ..system.look import ANEW, DONE, IN_USE, LONG, REFUSED, compiled_look, is_wanted, pending
from ..tables.layout import HostTable
from .clip import Gradients, Scaling
from .launch import Launch
from .numbers import HostNumbers, KnownScalars, scalars_of
from .plan import Plan
from .rule_optimizer import RuleOptimizer
from .scalars import Ahead

#: What groups, rules and numbers raise.
_OF_NUMBERS = (ValueError, TypeError, ArithmeticError, RuntimeError, LookupError, AttributeError)
#: Classes of values that cannot change while they are the same object; a subclass may convert itself.
_FIXED = (type(None), bool, int, float, str, np.bool_, *(t for t in np.sctypeDict.values() if issubclass(t, np.number)))
#: The list of gradients in a pointer table.
_GRADS = 1
#: A CPU step over more elements runs the long way, which lets other Python threads run meanwhile.
MAX_ELEMENTS = 1 << 20
#: A step that goes on changing is looked at in Python for at most this many steps before another record is made.
MAX_PATIENCE = 1 << 16
#: Steps after which launches that were none for a look are tried again.
RETRY = 256


class _LongWay(Exception):
    """Steps need more than a look can do."""


class QuickStep:
    """A step of the same launches over the same objects.

    Args:
        optimizer: which has just taken the step.
        known: the record of that step.
        extension: the compiled look.

    Raises:
        _LongWay: steps need more than a look can do.
        TypeError: groups have a value, or a tensor is of a class, that may change while it is the same object.
    """

    def __init__(self, optimizer: RuleOptimizer, known: Plan, extension: Any) -> None:
        groups, store = optimizer.param_groups, optimizer.store
        launches = [launch for launch in known.launches if len(launch.sweep.table.absent) < launch.count]
        devices = {launch.sweep.device for launch in launches}
        if len(devices) != 1 or not all(map(_serves, launches)) or any(group.get("capturable") for group in groups):
            raise _LongWay
        (device,), elements = devices, sum(sum(launch.sweep.table.numels) for launch in launches)
        self._on_cpu, self._index, self._threads = device.type == "cpu", device.index, torch.get_num_threads()
        can = elements <= MAX_ELEMENTS if self._on_cpu else extension.finds_driver()
        if not can or known.sharded or store.limits.budget.auto:
            raise _LongWay
        self._known, self._forked, self._settings = known, cpu.forked, _settings(optimizer)
        rule_of, format_of, *_ = self._settings
        depends = not getattr(rule_of, "of_items_alone", False)
        mapping = isinstance(optimizer.state_format, Mapping)  # which may be edited where it is
        self._asks = depends or mapping or format_of is not RuleOptimizer.state_format_of
        #: By which gradients are multiplied.
        self._factor = launches[0].sweep.factor
        self._clip, squares = None, {}
        if optimizer.skip_nonfinite:  # numbers of the host: the norm is read before they are counted
            raise _LongWay
        if known.factor is not None and optimizer.max_grad_norm is not None:
            if (gradients := known.factor.alone) is None:
                raise _LongWay
            self._clip, squares = QuickClip(gradients, known.factor.factors[device]), gradients.cells()
        first = dict(zip(known.launches, accumulate((b.count for b in known.launches), initial=0), strict=False))
        rows = [(-1, 0, 0, 0, -1, 0)] * sum(len(group["params"]) for group in groups)
        counted: list[tuple[int, list[int]]] = []
        self._launches: list[QuickLaunch] = []
        for i, launch in enumerate(launches):
            table = launch.sweep.table
            here = np.delete(np.arange(launch.count), table.absent)
            cells, stored = (each[here].tolist() for each in table.words_of_addresses(_GRADS))
            at = table.addresses_of(0)
            for row, cell, copy in zip(here.tolist(), cells, stored, strict=True):
                rows[launch.positions[row]] = i, at[row], cell, copy, *squares.get(first[launch] + row, (-1, 0))
            self._launches.append(QuickLaunch(launch, len(counted), here if table.absent else None))
            for state in self._launches[-1].states:
                if (found := state.addresses()) is None:
                    raise _LongWay
                counted.append((found[1], found[0][here].tolist()))
        parallel, count = cpu.openmp(), 0 if self._clip is None else self._clip.count
        self._look = extension.Look(
            groups, rows, len(self._launches), count, optimizer.state, known.seen.names_by_key, counted,
            store.versions.counters * len(self._launches), _FIXED,
            0 if parallel is None else ctypes.cast(parallel.parallel, ctypes.c_void_p).value,
        )  # fmt: skip
        bound = [each.bind(self._look.launch(i)) for i, each in enumerate(self._launches, count)]
        self._tables: list[TableLaunch] = [*self._launches]
        if self._clip is not None:
            bound.append(self._clip.bind(self._look))
            self._tables[:0] = self._clip.launches
        if not all(bound) or not known.still_holds(optimizer):
            raise _LongWay

    def prepare(self, optimizer: RuleOptimizer) -> int:
        """Prepare numbers for the step, from today's groups.

        Returns:
            ``DONE``; or why this is no quick step (see :mod:`pagedopt.system.look`).

        Raises:
            Exception: what groups, rules and numbers raise.
        """
        if not self._still_holds(optimizer):
            return ANEW
        if not self._may_run(optimizer):
            return LONG
        changed = self._look.take(optimizer.param_groups)
        if changed is None or ((changed or self._asks) and not self._known.seen.same_rules(optimizer)):
            return ANEW
        ahead: Ahead = {}
        for each in self._launches:
            if not each.prepare(optimizer, self._look, changed, ahead):
                return ANEW
        if (factor := self._factor) is not None:
            scaling = Scaling.of(optimizer)
            factor.clip_to(optimizer._max_grad_norm)
            factor.scale_by(*scaling)
            if scaling.found_inf is not None and float(scaling.found_inf):
                return LONG
        return DONE

    def run(self, optimizer: RuleOptimizer) -> int:
        """Take the prepared step, if only gradients and their addresses are other ones than before.

        Returns:
            ``DONE``; or why not: then nothing has happened.

        Raises:
            CudaError, MemoryError: a launch failed behind another one, or in the middle; the optimizer is damaged.
        """
        if self._on_cpu:
            return self._run(optimizer)
        stream = internals.current_stream(self._index)
        self._look.launch_on(stream)
        found = self._run_on(stream, optimizer)
        # Tables have buffers that no launch reads then.
        return self._run_on(stream, optimizer) if found == IN_USE else found

    def finds_other_layout(self, optimizer: RuleOptimizer) -> bool:
        """Whether the same state has another layout over the same memory."""
        found: bool = self._look.other_layout(optimizer.state)
        return found

    def _still_holds(self, optimizer: RuleOptimizer) -> bool:
        """Whether settings are what they were when the look was made."""
        if optimizer._plan is not self._known or self._known.seen.dead or self._forked is not cpu.forked:
            return False
        clip = self._clip
        if (optimizer._max_grad_norm is None) is not (clip is None) or (optimizer.scaled and self._factor is None):
            return False
        if (clip is not None and not clip.holds) or _settings(optimizer) != self._settings:
            return False
        return not self._on_cpu or torch.get_num_threads() == self._threads

    def _may_run(self, optimizer: RuleOptimizer) -> bool:
        """Whether nothing asks for more than a launch: hooks, modes, captures."""
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return False
        if torch_hooks._global_optimizer_pre_hooks or torch_hooks._global_optimizer_post_hooks:
            return False
        if self._clip is not None and internals.in_backward():  # where the norm is not known yet
            return False
        if internals.has_function_modes() and not internals.only_default_devices():
            return False
        if (store := optimizer.store).arenas and store.make_ready().residents != self._known.residents:
            return False
        if self._on_cpu:
            return True
        return internals.current_device() == self._index and not internals.is_capturing() and not virtual.dead

    def _run_on(self, stream: int, optimizer: RuleOptimizer) -> int:
        found = LONG
        try:
            for each in self._tables:
                each.borrow(stream)
            found = self._run(optimizer)
        finally:
            for each in self._tables:
                each.give_back(found == DONE)
        return found

    def _run(self, optimizer: RuleOptimizer) -> int:
        for each in self._launches:
            if not each.of.sweep.table.begin_writing():
                return ANEW  # an interrupt came behind a look: the long way writes the table again
        found: int = self._look.step(optimizer.param_groups, optimizer.state)
        for table in self._tables:
            table.looked(found)
        try:
            if found >= 2 * REFUSED:
                check_code("cuLaunchKernel", found - 2 * REFUSED)
            for each in self._launches if found == DONE else ():
                if each.call is not None and each.call.words[4]:
                    each.call.check()
        except (CudaError, MemoryError) as error:
            optimizer.damaged = f"a step failed in the middle ({type(error).__name__}: {error})"
            raise
        if found == DONE and self._clip is not None:
            optimizer.clipped_by = self._known.factor.factors  # type: ignore[union-attr]
        return found


def _serves(launch: Launch) -> bool:
    """Whether a launch is one, over rows where they lie, with numbers of the host."""
    sweep, numbers = launch.sweep, launch.numbers
    if not (launch.as_it_is and launch.route is None and sweep.table.whole_rows):
        return False
    if not isinstance(numbers, HostNumbers) or numbers.takes_tensors:
        return False
    return sweep.device.type == "cpu" or (sweep.transport.lends_host_memory and len(sweep.table.host.chunk_words) > 0)


def _settings(optimizer: RuleOptimizer) -> tuple[Any, ...]:
    """Return what users may set that decides on rules and formats; attributes may be functions of their own."""
    functions = [getattr(each, "__func__", None) for each in (optimizer.rule_of, optimizer.state_format_of)]
    return *functions, getattr(optimizer, "rule", None), optimizer.state_format, optimizer.rounding


class QuickSteps:
    """The quick step of an optimizer, made once its steps repeat.

    Args:
        before: those of the optimizer so far, of which only the look that was chosen stays.

    Attributes:
        step: it; None: there is none.
        patience: how many equal steps come before it is made.
    """

    def __init__(self, before: QuickSteps | None = None) -> None:
        self._wanted: bool = is_wanted() if before is None else before._wanted
        if self._wanted:
            compiled_look()  # begins to compile it, where that has not been done
        self.step: QuickStep | None = None
        self.patience = Patience(MAX_PATIENCE)
        self._equal = 0

    def take(self, optimizer: RuleOptimizer) -> bool:
        """Take a step; return whether it was taken.  Otherwise the optimizer is as it was."""
        if (step := self.step) is None:
            return False
        found = ANEW  # also behind an interrupt: what was taken of groups may not be in the table
        try:
            if (why := step.prepare(optimizer)) != DONE:
                found = why
            elif self.step is step:
                found = step.run(optimizer)
            else:  # a signal handler has taken a step
                found = LONG
        except _OF_NUMBERS:  # of numbers as they were, perhaps; the long way says what is wrong with those of now
            if optimizer.damaged:
                raise
        finally:
            if found == ANEW and self.step is step:
                if step.finds_other_layout(optimizer):  # which Python's look may not notice
                    optimizer._plan = None
                self.step, self._equal = None, 0
                self.patience.lost()
            self.patience.served += found == DONE
        return found == DONE

    def after(self, optimizer: RuleOptimizer, before: Plan | None, now: Plan) -> None:
        """Note a step that was taken the long way; ``before``: the record of the step before."""
        if now is not before:
            self.step, self._equal = None, 0
        elif self.step is None and self._wanted:
            self._equal += 1
            if self._equal >= self.patience.wait:
                self._equal = 0
                # The step is done: an error must not come for want of the next one.  A signal is not lost.
                with Uninterrupted(), contextlib.suppress(Exception):
                    if (extension := compiled_look()) is not None:
                        self.step = QuickStep(optimizer, now, extension)
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


#: A value of a group: its index, key and value.
Changed = tuple[int, str, Any]


# --- its launches, and the numbers that each is given -----------------------------------------------------------------


class TableLaunch:
    """A launch over one table.

    Args:
        host: the table.
        kernel: the compiled kernel.
        transport: how the table reaches a GPU; None: it is read on a CPU.

    Attributes:
        launch: what the look knows of it.
        call: the arguments of a CPU kernel.
    """

    def __init__(self, host: HostTable, kernel: Any, transport: Any = None) -> None:
        self.host, self._kernel, self._transport = host, kernel, transport
        self.launch: Any = None
        self.call: Any = None
        self._buffer: Any = None
        self._moves = False

    def bind(self, launch: Any) -> bool:
        """Tell the look what is launched; return False if it cannot be."""
        host, self.launch = self.host, launch
        if self._transport is None:
            entry = None if self._kernel is None else cpu.entry(self._kernel, host, torch.get_num_threads())
            if entry is not None:
                self.call = entry.call
                launch.kernel, launch.argument, launch.threads = entry.function, entry.call.address, entry.threads
            return entry is not None
        launch.kernel, launch.threads = self._kernel.handle, self._kernel.threads
        launch.blocks = self._kernel.grid(len(host.chunk_words))
        launch.source, launch.rows_end = host.words.ctypes.data, 8 * host.rows_end
        return bool(self._transport.lends_host_memory)

    def borrow(self, stream: int) -> None:
        """Take a buffer for the table, and tell the look of it."""
        if self._moves:  # as in the last step, most likely: not the buffer which that step's launch may still read
            self.host.rows_changed()
        buffer, launch = self._transport.borrow(self.host, stream), self.launch
        self._buffer = buffer
        launch.in_flight = in_flight = buffer.guarded is not None
        launch.stale = 0 if in_flight else 8 * buffer.stale(self.host)
        buffer.guarded = stream  # before the launch: an interrupt may come behind it
        launch.argument, launch.event, launch.target = buffer.argument, buffer.event, buffer.source

    def looked(self, found: int) -> None:
        """Note that a look has come to its end, and what it has found."""
        self._moves, self.launch.moves = self.launch.moves, False
        if self._moves:  # to other addresses, which are written or would have to be
            self.host.rows_changed()

    def give_back(self, launched: bool) -> None:
        """Give the buffer back, behind the launch if there was one."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and launched:
            buffer.written(self.host)


class QuickLaunch(TableLaunch):
    """A launch that updates parameters, and the numbers that its table is given in each step.

    Args:
        launch: it.
        first: the index of its first numbers in the look.
        present: the rows that take the step; None: all.

    Attributes:
        states: what reads and writes its numbers.
    """

    def __init__(self, launch: Launch, first: int, present: Any) -> None:
        sweep, on_cpu = launch.sweep, launch.sweep.device.type == "cpu"
        kernel, transport = (sweep.kernel, None) if on_cpu else (sweep.ready(), sweep.transport)
        super().__init__(sweep.table.host, kernel, transport)
        assert isinstance(launch.numbers, HostNumbers), "asked before"
        self.of, self._first, self._present, self._numbers = launch, first, present, launch.numbers
        self._rows_stamp, self.states = self.host.rows_stamp, launch.numbers.states
        self._forget()

    def _forget(self) -> None:
        self._pattern, self._groups = self._numbers.pattern, self._numbers.groups_of_sets
        self._scalars: KnownScalars = {}
        self._step: float | None = None  # the step count after the next step, if all rows have one; None: read it

    def prepare(self, optimizer: RuleOptimizer, look: Any, changed: Sequence[Changed], ahead: Ahead) -> bool:
        """Put the numbers of the next step into table and look; return False if these cannot be used any more.

        Args:
            changed: values of groups that are other ones now.
        """
        numbers, sweep = self._numbers, self.of.sweep
        if self.host.rows_stamp != self._rows_stamp:  # a step the long way may have written rows
            return False
        if numbers.pattern is not self._pattern:  # in a step the long way
            self._forget()
        for index, key, value in changed:
            if (scalars := self._scalars.get(index)) is not None:
                if type(value) is float and key in scalars:
                    scalars[key] = value
                else:
                    self._scalars = {}
        if self.states and self._step is None and not look.same_state(optimizer.state):
            return False  # numbers are read from where they were
        if self._groups is None or not self._prepare_alike(optimizer, look):
            now = numbers.prepare(optimizer, (), ahead, self._scalars)
            if sweep.table.host is not self.host:
                return False
            sweep.set_scalars(now.sets, now.seeds)
            for number, (_, _, coming) in enumerate(now.counts, self._first):
                if isinstance(coming, float):
                    look.set_number(number, coming, False)
                else:
                    look.set_numbers(number, coming if self._present is None else coming[self._present])
        self._rows_stamp = self.host.rows_stamp  # of rows that may be in other sets now
        return True

    def _prepare_alike(self, optimizer: RuleOptimizer, look: Any) -> bool:
        """Prepare, if all rows have one step count, or none; return whether it is so."""
        rule, factor = self.of.sweep.rule, self.of.sweep.factor
        if self.states:
            if self._step is None:
                if not isinstance(found := self.states[0].read((), (), {}), float):
                    return False
                self._step = found
            look.set_number(self._first, self._step, True)
        if not self._scalars:
            assert self._groups is not None, "asked before"
            groups = optimizer.param_groups
            self._scalars = {i: scalars_of(rule, groups[i], optimizer.defaults) for i in self._groups}
        # What Rule.uniforms() does besides: groups give floats alone here, and the table makes floats of the results.
        step = {"step": self._step} if "step" in rule.scalars else {}
        sets = [rule.program.on_numbers(**scalars, **step) for scalars in self._scalars.values()]
        self.host.set_scalars(sets if factor is None else [[*uniforms, factor.word] for uniforms in sets])
        return True

    def looked(self, found: int) -> None:
        """Note that a look has come to its end, and what it has found."""
        super().looked(found)
        self.of.sweep.table.end_writing()
        self._rows_stamp = self.host.rows_stamp
        if found == DONE:
            self.of.sweep.launches += 1
            if self._step is not None:
                self._step += 1.0
        elif found != IN_USE:  # else it comes again
            self._step = None


class QuickClip:
    """The launches that add the squares of all gradients on one device, and what takes their norm: the factor.

    Args:
        gradients: they.
        factor: it.

    Attributes:
        launches: one for each list of gradients.
        count: how many launches come in front of all updates.
    """

    def __init__(self, gradients: Gradients, factor: Factor) -> None:
        self._gradients, self._squares, self._factor = gradients, gradients.squares, factor
        self.launches = [TableLaunch(*each) for each in self._squares.launches()]
        self._argument = total_at(*self._squares.place, 0, factor)
        self.count = len(self.launches) + (factor.device.type == "cuda")

    @property
    def holds(self) -> bool:
        """Whether a step the long way has made no other tables of squares since."""
        return self._gradients.squares is self._squares

    def bind(self, look: Any) -> bool:
        """Tell the look what is launched; return False if it cannot be."""
        if (device := self._factor.device).type == "cpu":
            look.clip_with(*self._squares.place, self._factor.address)
        else:
            kernel, total = cuda.total_kernel(device.index), look.launch(len(self.launches))
            total.kernel, total.threads, total.blocks = kernel.handle, kernel.threads, kernel.grid(1)
            total.argument = self._argument.ctypes.data
        return all(each.bind(look.launch(i)) for i, each in enumerate(self.launches))
