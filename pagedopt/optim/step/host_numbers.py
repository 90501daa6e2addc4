"""Hyperparameters and step counts of one launch, which the host reads and computes in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...launch.sweep import Sweep
from ..state.group_options import seed_word
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead, NumberTensors, ScalarState, StepCounts, UnsavedStepCounts, Values, number_names
from .hyperparameters import KnownScalars, Pattern, Uniforms, find_pattern, uniforms_of
from .members import Member

#: One name of numbers (as "step") over a bucket: (what reads and writes them, their tensors, their new values).
Count = tuple[ScalarState, NumberTensors, Values | float]


class Numbers(NamedTuple):
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


class HostNumbers:
    """Numbers that the host reads and computes in each step, and writes into the table.

    Args:
        members: the parameters of the launch.
        shared: addresses of numbers that several parameters share (see :class:`ScalarState`).
        sweep: the launch.

    Attributes:
        pattern: which rows of the table share hyperparameters; it is another object once that has changed.
        takes_tensors: whether :meth:`prepare` needs the tensors of numbers, and not only their addresses.
    """

    __slots__ = (
        "_carried", "_groups", "_rule", "_scalars", "_seeded", "_states", "_table", "pattern", "takes_tensors"
    )  # fmt: skip

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], sweep: Sweep) -> None:
        self._rule, self._table, self._seeded = sweep.rule, sweep.table, sweep.stored.by_position
        # Stored, because as properties of the rule each would be one more Python call in every prepare().
        self._scalars, self._carried = self._rule.scalars, self._rule.carried
        self._groups = groups_of(members)
        self._states = number_states(optimizer, members, shared)
        self.pattern: Pattern | None = None
        self.takes_tensors = any(each.takes_tensors for _, each, _ in self._states)

    @property
    def states(self) -> tuple[ScalarState, ...]:
        """What reads and writes the numbers of each name, in the order of :attr:`Numbers.counts`."""
        return tuple([state for _, state, _ in self._states])

    @property
    def groups_of_sets(self) -> tuple[int, ...] | None:
        """The group of each set of hyperparameters; None: rows of a group differ, or rules, seeds or tensors decide."""
        pattern = self.pattern
        counts = [state for _, state, _ in self._states]
        if pattern is None or self._carried or self._seeded or [*map(type, counts)] not in ([], [StepCounts]):
            return None
        if not all(isinstance(rows, int) for _, rows in pattern.groups):
            return None
        return tuple([index for index, _ in pattern.groups])

    def compile(self) -> None:
        """Do nothing: the host computes in Python."""

    def prepare(
        self,
        optimizer: RuleOptimizer,
        numbers: NumberTensors,
        ahead: Ahead,
        known: KnownScalars | None = None,
        absent: list[int] | None = None,
    ) -> Numbers:
        """Return the numbers of this launch of a step.

        Args:
            numbers: see :meth:`Bucket.numbers_of`.
            ahead: see :meth:`ScalarState.read`.
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
        return Numbers((*counts.values(),), sets, self._seeds(optimizer, pattern, counts) if self._seeded else 0)

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


def groups_of(members: Sequence[Member]) -> tuple[int, ...]:
    """Return the index of each member's group."""
    return tuple([m.group for m in members])


def number_states(
    optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int]
) -> tuple[tuple[str, ScalarState, slice], ...]:
    """Return (name, numbers, where their tensors are among all numbers of the bucket) for each name."""
    rule, count = members[0].rule, len(members)
    found = []
    for i, name in enumerate(number_names(optimizer, rule)):
        kind = StepCounts if name == "step" and optimizer.counts_steps else ScalarState
        found.append((name, kind([m.entry[name] for m in members], shared), slice(i * count, (i + 1) * count)))
    if not optimizer.counts_steps and "step" in rule.scalars:
        # State has no step count: assume 0 steps so far if the parameter's state is made now, and 1 otherwise.
        found.insert(0, ("step", UnsavedStepCounts([not m.missing or m.again for m in members]), slice(0)))
    return tuple(found)
