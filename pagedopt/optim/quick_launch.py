"""The launches of a step in one compiled call, and the numbers that each is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels import cpu, cuda
from ..launch.factor import Factor
from ..launch.sums import total_at
from ..system.look import DONE, IN_USE
from ..tables.layout import HostTable
from .clip import Gradients
from .launch import Launch
from .numbers import HostNumbers, KnownScalars, scalars_of
from .rule_optimizer import RuleOptimizer
from .scalars import Ahead

#: A value of a group: its index, key and value.
Changed = tuple[int, str, Any]


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
