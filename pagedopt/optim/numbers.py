"""Hyperparameters and step counts of one launch: read and computed by the host in each step, or left to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import SINGLES
from ..launch.on_device import SINGLE, DeviceStep
from ..launch.sweep import Sweep
from ..rules import Rule
from .gather import Member
from .options import seed_word
from .rule_optimizer import RuleOptimizer
from .scalars import Ahead, NumberTensors, ScalarState, StepCounts, UnsavedStepCounts, Values, number_of, scalars_of

#: For each set of hyperparameters, what a kernel gets for it (:meth:`Rule.uniforms`).
Uniforms = Sequence[Sequence[float]] | npt.NDArray[np.float64]
#: For each group in use: (its index, the first row of each of its sets; an int instead of an array if it has one).
SetsByGroup = Sequence[tuple[int, int | npt.NDArray[np.int64]]]

#: Hyperparameters of groups, by the group's index.
KnownScalars = dict[int, dict[str, Any]]


def uniforms_of(
    rule: Rule,
    optimizer: RuleOptimizer,
    leaders: SetsByGroup,
    own: Mapping[str, Values | float],
    known: KnownScalars,
) -> Uniforms:
    """Return the numbers of each set of hyperparameters.

    Args:
        leaders: the sets.
        own: hyperparameters that each row has for itself, by name; one number if all rows have the same.
        known: what groups are known to hold; what it lacks is entered.

    Raises:
        KeyError, ValueError, TypeError: see :func:`scalars_of`.
        TypeError, ArithmeticError, RuntimeError, RuleError: see :meth:`Rule.uniforms`.
    """
    found: list[Any] = []
    for index, rows in leaders:
        if (scalars := known.get(index)) is None:
            scalars = known[index] = scalars_of(rule, optimizer.param_groups[index], optimizer.defaults)
        scalars = scalars.copy()
        for name, values in own.items():
            if isinstance(values, float):
                scalars[name] = values if isinstance(rows, int) else np.full(len(rows), values)
            else:
                scalars[name] = float(values[rows]) if isinstance(rows, int) else values[rows]
        if isinstance(rows, int):
            found.append([rule.uniforms(scalars)])
        elif own:
            found.append(rule.uniform_sets(scalars))
        else:  # sets that differ in their seeds alone
            found.append(np.array([rule.uniforms(scalars)] * len(rows)))
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if any(isinstance(s, np.ndarray) for s in found) else [s for (s,) in found]


class Pattern(NamedTuple):
    """Which rows share a set of hyperparameters.

    Attributes:
        absent: rows that take no step and are in no set.
        groups: the sets, by group.
        sets: the set of each row.
        leaders: for each row, the first row of its set.
        used: the number of sets.
    """

    absent: list[int]
    groups: SetsByGroup
    sets: npt.NDArray[np.int64]
    leaders: npt.NDArray[np.int64]
    used: int

    def holds(self, own: Mapping[str, Values | float]) -> bool:
        """Tell whether the rows of each set have the same ``own`` values, to the bit."""
        for values in own.values():
            if not isinstance(values, float) and values.tobytes() != values[self.leaders].tobytes():
                return False
        return True


def find_pattern(groups: Sequence[int], absent: Sequence[int], own: Mapping[str, Values | float]) -> Pattern:
    """Put rows of one group with equal ``own`` hyperparameters (see :func:`uniforms_of`) into one set."""
    of_rows = keys = np.array(groups, np.int64)
    for values in (values for values in own.values() if not isinstance(values, float)):
        distinct, rank = np.unique(values.view(np.int64), return_inverse=True)  # as bits: NaN equals NaN
        keys = keys * len(distinct) + rank
    present = np.setdiff1d(np.arange(len(keys)), absent)
    _, first, inverse = np.unique(keys[present], return_index=True, return_inverse=True)
    rows = present[first]  # sorted by group, which is the leading part of a key
    ends = np.flatnonzero(np.diff(of_rows[rows])) + 1
    parts = [(int(of_rows[p[0]]), int(p[0]) if len(p) == 1 else p) for p in np.split(rows, ends)]
    sets, leaders = np.zeros(len(keys), np.int64), np.arange(len(keys))
    sets[present] = inverse
    leaders[present] = rows[inverse]
    return Pattern(list(absent), tuple(parts), sets, leaders, len(rows))


#: One name of numbers (as "step") over a launch: (what reads and writes them, their tensors, their new values).
Count = tuple[ScalarState, NumberTensors, Values | float]


class Counts(NamedTuple):
    """The numbers of one launch in one step.

    Attributes:
        counts: those that change, with their new values; none if the device counts.
        sets: the hyperparameters of each set in use; none if the device has them.
        seeds: one for all sets or one for each.
        written: tensors that the launch itself writes.
    """

    counts: tuple[Count, ...] = ()
    sets: Uniforms = ()
    seeds: float | Sequence[float] = 0
    written: NumberTensors = ()


class Numbers:
    """Where the hyperparameters and step counts of one launch come from: the host, or the device.

    Args:
        members: the parameters of the launch.
        shared: addresses of numbers that several parameters share (see :class:`ScalarState`).
        sweep: the launch.

    Attributes:
        takes_tensors: whether :meth:`prepare` needs the tensors of numbers, and not only their addresses.
    """

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], sweep: Sweep) -> None:
        self._rule, self._groups = sweep.rule, tuple([m.group for m in members])
        counted, count, found = optimizer.counts_steps, len(members), []
        for i, name in enumerate(members[0].numbers):
            kind = StepCounts if name == "step" and counted else ScalarState
            found.append((name, kind([m.entry[name] for m in members], shared), slice(i * count, (i + 1) * count)))
        if not counted and "step" in self._rule.scalars:
            # State has no step count: assume 0 steps so far if the parameter's state is made now, and 1 otherwise.
            found.insert(0, ("step", UnsavedStepCounts([not m.missing or m.again for m in members]), slice(0)))
        #: For each name its numbers, and where their tensors are among all numbers of the launch.
        self._states = tuple(found)
        self.takes_tensors = any(each.takes_tensors for _, each, _ in self._states)

    def compile(self) -> None:
        """Compile (or load) now what computes them on a device."""

    def prepare(self, optimizer: RuleOptimizer, numbers: NumberTensors, ahead: Ahead) -> Counts:
        """Return the numbers of the launch in a step.

        Args:
            numbers: the tensors of numbers, name by name.
            ahead: see :meth:`ScalarState.read`.
        """
        raise NotImplementedError


class HostNumbers(Numbers):
    """Numbers that the host reads and computes in each step, and writes into the table.

    Attributes:
        pattern: which rows of the table share hyperparameters; it is another object once that has changed.
        states: what reads and writes the numbers of each name, in the order of :attr:`Counts.counts`.
    """

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], sweep: Sweep) -> None:
        super().__init__(optimizer, members, shared, sweep)
        self._table, self._seeded = sweep.table, sweep.stored.by_position
        # Stored, because as properties of the rule each would be one more Python call in every prepare().
        self._scalars, self._carried = self._rule.scalars, self._rule.carried
        self.pattern: Pattern | None = None
        self.states = tuple([state for _, state, _ in self._states])

    @property
    def groups_of_sets(self) -> tuple[int, ...] | None:
        """The group of each set of hyperparameters; None: rows of a group differ, or rules, seeds or tensors decide."""
        pattern = self.pattern
        if pattern is None or self._carried or self._seeded or [*map(type, self.states)] not in ([], [StepCounts]):
            return None
        if not all(isinstance(rows, int) for _, rows in pattern.groups):
            return None
        return tuple([index for index, _ in pattern.groups])

    def prepare(
        self,
        optimizer: RuleOptimizer,
        numbers: NumberTensors,
        ahead: Ahead,
        known: KnownScalars | None = None,
        absent: list[int] | None = None,
    ) -> Counts:
        """Return the numbers of the launch in a step.

        Args:
            numbers, ahead: see :meth:`Numbers.prepare`.
            known: see :func:`uniforms_of`; None: nothing is known.
            absent: indices of parameters that take no step; None: those that the table skips.
        """
        absent, pattern = self._table.absent if absent is None else absent, self.pattern
        own, counts = {}, {}
        for name, each, where in self._states:
            mine = numbers[where]
            counts[name] = each, mine, each.read(mine, absent, ahead)
            if name in self._scalars:
                own[name] = counts[name][-1]
        apart = own  # what is equal in all rows of a set
        if self._seeded and "step" in counts:
            apart = {**own, "step": counts["step"][-1]}
        if pattern is None or pattern.absent != absent or not pattern.holds(apart):
            pattern = self._find_pattern(absent, apart)
        sets = uniforms_of(self._rule, optimizer, pattern.groups, own, {} if known is None else known)
        for name, at in self._carried.items():
            each, mine, _ = counts[name]
            coming = np.asarray(sets)[pattern.sets, at]
            each.announce(mine, coming, absent, ahead)
            counts[name] = each, mine, coming
        return Counts((*counts.values(),), sets, self._seeds(optimizer, pattern, counts) if self._seeded else 0)

    def _seeds(self, optimizer: RuleOptimizer, pattern: Pattern, counts: Mapping[str, Count]) -> list[float]:
        """Return a seed for each set: the group's, and in the lower 32 bits the step (0 if none is counted)."""
        steps = counts["step"][-1] if "step" in counts else 0.0
        seeds: list[float] = []
        for group, rows in pattern.groups:
            word = seed_word(optimizer, group)
            if isinstance(steps, float):
                seeds += [word + steps] * (1 if isinstance(rows, int) else len(rows))
            else:
                seeds += (word + steps[[rows] if isinstance(rows, int) else rows]).tolist()
        return seeds

    def _find_pattern(self, absent: list[int], own: Mapping[str, Values | float]) -> Pattern:
        """Find which rows share hyperparameters, and write that into the table."""
        self.pattern = None  # until the table has the new one: if we fail before, the next step tries again
        pattern, table = find_pattern(self._groups, absent, own), self._table
        if pattern.used > len(table.host.scalars):  # parameters have begun to differ in their own hyperparameters
            table.make_room(min(2 * pattern.used, len(self._groups)))
        table.assign_sets(pattern.sets)
        self.pattern = pattern
        return pattern


class DeviceNumbers(Numbers):
    """Numbers that the host never reads back: the prologue of the rule computes what a set needs.

    Learning rates and betas that are tensors on the device are read there in each launch; numbers on the host are
    copied there when they change.  The table gets a set for each row, and lies in device memory.
    """

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], sweep: Sweep) -> None:
        super().__init__(optimizer, members, shared, sweep)
        self._sweep, table, index = sweep, sweep.table, sweep.device.index
        assert index is not None
        table.make_room(len(members))
        table.assign_sets(np.arange(len(members)))
        counters = next((n.behind for _, n, _ in self._states if isinstance(n, UnsavedStepCounts)), None)
        groups = len(optimizer.param_groups)
        self._device_step = DeviceStep(self._rule, index, table.host, groups, counters, sweep.factor)
        sweep.transport = self._device_step
        self._group_of_row = np.array(self._groups)
        names = members[0].numbers
        self._all_writable = not any(m.entry[name].is_inference() for name in names for m in members)
        #: Whether the device was told where step counts and other numbers of parameters lie: they stay there.
        self._told = False
        #: Tensors of hyperparameters, which the device reads.
        self._tensors: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def takes(member: Member, names: Sequence[str], shared: set[int]) -> bool:
        """Tell whether a parameter's numbers are where the device can count them: on it, as float32 or float64."""
        if not member.param.is_cuda:
            return False
        numbers, device = [member.entry[name] for name in names], member.param.device
        return all(n.device == device and n.dtype in SINGLES and n.data_ptr() not in shared for n in numbers)

    def compile(self) -> None:
        """Compile (or load) the prologue now."""
        self._device_step.compile()

    def prepare(self, optimizer: RuleOptimizer, numbers: NumberTensors, ahead: Ahead) -> Counts:
        """Do what :meth:`HostNumbers.prepare` does, without reading a number from the device."""
        self.tell(optimizer, None if self._told else numbers)
        absent = self._sweep.table.absent
        if absent or not self._all_writable:
            away, count = set(absent), len(self._groups)
            numbers = [n for i, n in enumerate(numbers) if i % count not in away and not n.is_inference()]
        return Counts(written=numbers)

    def tell(self, optimizer: RuleOptimizer, numbers: NumberTensors | None) -> None:
        """Write what the prologue reads: constants, and addresses of hyperparameters, step counts and own numbers.

        Args:
            numbers: see :meth:`prepare`; None: they lie where the device was told.

        Raises:
            KeyError, ValueError, TypeError: see :func:`~.hyperparameters.scalars_of`.
            RuntimeError: a tensor is on another device, or not one number of float32 or float64.
        """
        step, table, device = self._device_step, self._sweep.table, self._sweep.device
        constants, tensors = np.zeros_like(step.constants), []
        sources = np.zeros((len(constants), len(self._rule.scalars)), np.uint64)
        for group in set(self._groups):
            for i, (name, value) in enumerate(self._values(optimizer, group)):
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                    sources[group, i] = _address(value, name, device)
                else:
                    constants[group, i], sources[group, i] = value, step.constant_at(group, i)
        inputs = np.zeros_like(step.inputs)
        words = {group: 1 + int(seed_word(optimizer, group)) for group in set(self._groups)}
        inputs[:, 0] = [words[group] for group in self._groups]
        inputs[:, 2:] = sources[self._group_of_row]
        for name, each, where in self._states:
            column = 1 if name == "step" else 2 + self._rule.scalars.index(name)
            if numbers is None:
                inputs[:, column] = step.inputs[:, column]
            elif isinstance(each, UnsavedStepCounts):
                inputs[:, column] = [step.counter_at(row) for row in range(len(self._groups))]
            else:
                inputs[:, column] = [_address(n, name, device) for n in numbers[where]]
        inputs[table.absent, 0] = 0
        if step.inputs.tobytes() != inputs.tobytes() or step.constants.tobytes() != constants.tobytes():
            step.inputs[:], step.constants[:], step.changed = inputs, constants, True
            table.host.stamp += 1  # a step that was prepared before has other numbers
        self._tensors, self._told = tuple(tensors), True
        step.reads_hyperparameters = bool(tensors)

    def _values(self, optimizer: RuleOptimizer, group: int) -> list[tuple[str, Any]]:
        """Return (name, number or tensor on the device) of each hyperparameter; 0 for those that parameters have.

        A tensor that the device cannot read is read here; in a capture :func:`_address` refuses it.
        """
        values = scalars_of(self._rule, optimizer.param_groups[group], optimizer.defaults, on_device=True)
        if not torch.cuda.is_current_stream_capturing():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and not _can_be_read(value, self._sweep.device):
                    values[name] = number_of(name, value)
        return [(name, values.get(name, self._rule.defaults.get(name, 0.0))) for name in self._rule.scalars]

    def differences(self, optimizer: RuleOptimizer) -> list[str]:
        """Return the names of hyperparameters that are not what the device was told."""
        step, found = self._device_step, []
        for group in sorted(set(self._groups)):
            for i, (name, value) in enumerate(self._values(optimizer, group)):
                if isinstance(value, torch.Tensor):
                    same = any(value is t for t in self._tensors)
                else:
                    same = np.float64(value).tobytes() == step.constants[group, i].tobytes()
                if not same:
                    found.append(f"{name} of group {group}")
        return found

    @property
    def is_told(self) -> bool:
        """Whether the device has, or will have, all that the table says."""
        return self._device_step.is_told(self._sweep.table.host)

    def publish(self, stream: int) -> bool:
        """Queue a copy of what has changed on a stream; see :meth:`DeviceStep.publish`."""
        return self._device_step.publish(self._sweep.table.host, stream)


def _can_be_read(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the prologue can read a number in ``tensor``."""
    return tensor.device == device and tensor.dtype in SINGLES and tensor.numel() == 1


def _address(tensor: torch.Tensor, name: str, device: torch.device) -> int:
    """Return the address of a number, with the mark of a float32."""
    if not _can_be_read(tensor, device):
        raise RuntimeError(
            f"{name} is a tensor of {tensor.numel()} elements, {tensor.dtype} on {tensor.device}; a step on {device} "
            "whose numbers stay there reads one element of float32 or float64 there"
        )
    return tensor.data_ptr() | (SINGLE if tensor.dtype is torch.float32 else 0)
