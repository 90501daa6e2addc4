"""A launch of a step in one compiled call, and the numbers that it is given in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...kernels import cpu, team
from ...system.look import words
from ...system.look.record import Record
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead
from .bucket import Bucket
from .host_numbers import HostNumbers
from .hyperparameters import KnownScalars, scalars_of


class QuickLaunch(NamedTuple):
    """A launch of a quick step.

    Attributes:
        bucket: its table.
        numbers: what its table is given in each step.
        words: those of a record's launch.
        team: the arguments of a CPU kernel; None: on a GPU.
    """

    bucket: Bucket
    numbers: HostNumbers
    words: list[int]
    team: team.Call | None


class QuickNumbers:
    """The numbers of a launch, for a record: in Python alone where all its rows have one step count.

    Args:
        launch: it.
        first: the index of its first numbers in the record.
        present: the rows that take the step; None: all.
    """

    __slots__ = (
        "_compute", "_counts", "_first", "_groups", "_host", "_known", "_launch", "_numbers", "_pattern", "_present",
        "_rows_stamp", "_scalars", "_step", "_table", "_takes_step", "reads",
    )  # fmt: skip

    def __init__(self, launch: QuickLaunch, first: int, present: npt.NDArray[np.int64] | None) -> None:
        self._launch, self._first, self._present, self._numbers = launch, first, present, launch.numbers
        self._table, rule = launch.bucket.sweep.table, launch.bucket.sweep.rule
        self._host, self._counts = self._table.host, launch.numbers.states
        self._rows_stamp = self._host.rows_stamp
        # What Rule.uniforms() does besides: groups give floats alone here, and the table makes floats of the results.
        self._compute, self._takes_step = rule.program.on_numbers, "step" in rule.scalars
        self._pattern, self._groups = launch.numbers.pattern, launch.numbers.groups_of_sets
        self._known: KnownScalars = {}
        self._scalars: KnownScalars = {}  # where all rows have one step count
        self._step: float | None = None  # the step count after the next step; None: read it
        #: Whether the next step reads numbers from state.
        self.reads = bool(self._counts)

    def forget_groups(self) -> None:
        """Read the groups anew in the next step."""
        self._known, self._scalars = {}, {}

    def take_values(self, changed: Sequence[tuple[int, str, Any]]) -> None:
        """Take values of groups that are other ones now: the group's index, key and value of each."""
        self._known = {}
        for index, key, value in changed:
            if (scalars := self._scalars.get(index)) is not None:
                if type(value) is float and key in scalars:
                    scalars[key] = value
                else:
                    self._scalars = {}

    def forget_counts(self) -> None:
        """Read the step counts anew in the next step."""
        self._step, self.reads = None, bool(self._counts)

    def prepare(self, optimizer: RuleOptimizer, record: Record, ahead: Ahead) -> bool:
        """Put the numbers of the next step into table and record; return False if these cannot be used any more."""
        if self._host.rows_stamp != self._rows_stamp:  # a step the long way may have written rows
            return False
        if self._numbers.pattern is not self._pattern:  # in a step the long way
            self._pattern, self._groups = self._numbers.pattern, self._numbers.groups_of_sets
            self.forget_groups()
            self.forget_counts()
        if self._groups is None or not self._prepare_alike(optimizer, record):
            self._prepare_each(optimizer, record, ahead)
        self._rows_stamp = self._host.rows_stamp  # of rows that may be in other sets now
        return self._table.host is self._host

    def looked(self, taken: bool) -> None:
        """Note that a look has come to its end, and whether the step was taken."""
        self._rows_stamp = self._host.rows_stamp
        if taken and self._step is not None:
            self._step += 1.0

    def _prepare_alike(self, optimizer: RuleOptimizer, record: Record) -> bool:
        """Prepare, if all rows have one step count, or none; return whether it is so."""
        if (step := self._step) is None and self._counts:
            found = self._counts[0].read((), (), {})
            if not isinstance(found, float):
                return False
            step = self._step = found
            self.reads = False
            record.expect(self._first, True)
        if not self._scalars:
            assert self._groups is not None, "asked before"
            groups = optimizer.param_groups
            rule = self._launch.bucket.sweep.rule
            self._scalars = {i: scalars_of(rule, groups[i], optimizer.defaults) for i in self._groups}
        if step is not None:
            record.set_number(self._first, step)
        sets = []
        for scalars in self._scalars.values():
            if self._takes_step:
                scalars["step"] = step
            sets.append(self._compute(**scalars))
        self._host.set_scalars(sets)
        return True

    def _prepare_each(self, optimizer: RuleOptimizer, record: Record, ahead: Ahead) -> None:
        now = self._numbers.prepare(optimizer, (), ahead, self._known)
        if self._table.host is self._host:
            self._launch.bucket.sweep.set_scalars(now.sets, now.seeds)
            for number, (_, _, coming) in enumerate(now.counts, self._first):
                here = self._present
                record.expect(number, False)
                record.set_number(number, coming if here is None or isinstance(coming, float) else coming[here])


def quick_launch(bucket: Bucket) -> QuickLaunch | None:
    """Return the launch of a bucket; None: it is not one launch, over rows where they lie, with numbers of the host."""
    sweep, numbers = bucket.sweep, bucket.numbers
    simple = bucket.as_it_is and bucket.route is None and sweep.table.whole_rows
    if not simple or sweep.factor is not None or not isinstance(numbers, HostNumbers) or numbers.takes_tensors:
        return None
    found, host = [0] * words.LAUNCH, sweep.table.host
    if sweep.device.type == "cpu":
        entry = None if sweep.kernel is None else cpu.entry(sweep.kernel, host, torch.get_num_threads())
        if entry is None:
            return None
        found[words.KERNEL], found[words.THREADS] = entry.function, entry.threads
        found[words.ARGUMENT] = entry.call.address
        return QuickLaunch(bucket, numbers, found, entry.call)
    if not sweep.transport.lends_host_memory or not len(host.chunk_words):  # without chunks nothing is launched
        return None
    kernel = sweep.ready()
    found[words.KERNEL], found[words.THREADS] = kernel.handle, kernel.threads
    found[words.BLOCKS] = kernel.grid(len(host.chunk_words))
    found[words.SOURCE], found[words.ROWS_END] = host.words.ctypes.data, 8 * host.rows_end
    return QuickLaunch(bucket, numbers, found, None)


__all__ = ["QuickLaunch", "QuickNumbers", "quick_launch"]
