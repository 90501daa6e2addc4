"""One launch's share of an optimizer: parameters of one rule, device and formats, with their table and numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...formats.format import Format
from ...launch.route import route
from ...launch.sweep import Sweep
from ...paging.visits import WHOLE
from ...tables.checks import LayoutError
from ...tables.columns import Tensors, is_dense
from ...tables.shards import local
from ...transports.choose import pooled
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead, Numerals, ScalarState, StepCounts, UnsavedStepCounts, Values, number_names
from .hyperparameters import Pattern, Uniforms, find_pattern, uniforms_of
from .kernel_views import KernelViews
from .members import Grads, Member
from .update import Count, Update


class Bucket:
    """Parameters that one launch updates: their table, and what of a step stays as it is from one to the next.

    It keeps no parameter, gradient or state alive: :meth:`prepare` is given them.

    Args:
        optimizer: whose groups and options.
        members: the parameters; they have one rule and, list by list, one format.
        shared: addresses of numbers that stand for several parameters (see :class:`ScalarState`).
        shards: gradients of DTensors.

    Attributes:
        keys: names of the columns of its state, in the rule's order.
        names: names of its numbers.
    """

    __slots__ = (
        "_carried", "_groups", "_inference", "_loose", "_numbers", "_pattern", "_rounded", "_scalars", "count", "keys",
        "lists", "names", "route", "rule", "sweep", "takes_state",
    )  # fmt: skip

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], shards: Grads) -> None:
        self.rule, self.count = members[0].rule, len(members)
        self._scalars, self._carried = self.rule.scalars, self.rule.carried
        self.keys, self.names = _same(tuple(members[0].columns)), number_names(optimizer, self.rule)
        self._groups = tuple([m.group for m in members]) if len(members) > 1 else _same((members[0].group,))
        self.lists = KernelViews(members, self.keys)
        tensors, sets = self.tensors_of(members), min(2 * len(set(self._groups)), len(members))
        formats = (None, None, *members[0].formats[2:])
        state = self._cut(self.lists.state_as_seen(members, self.keys))
        try:
            lists = self._cut(self.lists.as_seen(tensors, shards))
            self.route = route(optimizer.store, lists[0], state)
            self.sweep = self._sweep(optimizer, [*lists, *state], formats, sets)
        except LayoutError:
            if not self.lists.lay_out_gradients():
                raise
            lists = self._cut(self.lists.as_seen(tensors, shards))
            self.sweep = self._sweep(optimizer, [*lists, *state], formats, sets)
        self._numbers = _numbers(optimizer, members, shared)
        self._pattern: Pattern | None = None
        single = lists[0][0].is_cuda and self.sweep.arithmetic is torch.float32
        self._rounded = tuple(optimizer.rounded_on_cuda) if single else ()
        own = [local(m.entry[key]) for key in self.keys for m in members]
        self._loose = tuple(optimizer.store.versions.others(own))
        self._inference = any(t.is_inference() for t in (*lists[0], *(own[i] for i in self._loose)))
        #: Whether steps take the tensors of state themselves, and not only the table's word for where they are.
        self.takes_state = (
            _runs_beside_python(lists[0][0].device)
            or not self.lists.plain
            or bool(self._loose)
            or any(each.takes_tensors for _, each, _ in self._numbers)
        )

    @classmethod
    def partition(
        cls, optimizer: RuleOptimizer, members: Sequence[Member], shards: Grads
    ) -> list[tuple[Bucket, list[Member]]]:
        """Sort all parameters by what a launch must have in common, one that stands twice, or two that share memory,
        into launches that follow each other."""
        memory = _memories(members)
        if len(set(memory)) < len(memory) or any(m.rule.carried for m in members):
            _take_turns(members, memory)
        found: dict[tuple[Any, ...], list[Member]] = {}
        for member in sorted(members, key=lambda m: m.turn):
            found.setdefault((member.turn, member.rule, member.param.device, member.formats), []).append(member)
        numbers = [m.entry[name].data_ptr() for m in members for name in number_names(optimizer, m.rule)]
        once: set[int] = set()
        shared = {at for at in numbers if at in once or once.add(at)}  # type: ignore[func-returns-value]
        return [(cls(optimizer, each, shared, shards), each) for each in found.values()]

    def _sweep(
        self, optimizer: RuleOptimizer, lists: Sequence[Any], formats: Sequence[Format | None], sets: int
    ) -> Sweep:
        rows, shape = (self.route.rows, self.route.geometry) if self.route else (None, None)
        device, transport = lists[0][0].device, optimizer.transport
        sweep = Sweep(
            self.rule, lists, formats=formats, sets=sets,
            transport=pooled(transport, device.index) if device.type == "cuda" else transport,
            blocks=optimizer.blocks, rows=rows, geometry=shape,
        )  # fmt: skip
        sweep.table.let_go()
        return sweep

    def tensors_of(self, members: Sequence[Member]) -> Tensors:
        """What :meth:`prepare` takes of the members that it was made for: parameters, gradients, state by column."""
        state = [m.entry[key] for key in self.keys for m in members]
        return (*(m.param for m in members), *(m.param.grad for m in members), *state)

    def numbers_of(self, members: Sequence[Member]) -> Numerals:
        """And their numbers, name by name."""
        return tuple([m.entry[name] for name in self.names for m in members])

    def _cut(self, tensors: Sequence[Any]) -> list[Any]:
        """Lists that lie one behind the other."""
        return [tensors[i : i + self.count] for i in range(0, len(tensors), self.count)]

    def prepare(
        self, optimizer: RuleOptimizer, tensors: Tensors, numbers: Numerals, ahead: Ahead, shards: Grads
    ) -> Update | None:
        """The update of a step, with addresses, numbers and hyperparameters as they are now; None: nothing to update.

        Args:
            tensors: parameters, gradients and state, list by list.
            numbers: of the parameters, name by name.
            ahead: see :meth:`ScalarState.read`.
            shards: gradients of DTensors.

        Raises:
            RuntimeError: parameters were made in ``torch.inference_mode``, and this is outside of it (as torch).
            ValueError, TypeError: see :meth:`PointerTable.refresh`.
            CompileError: the kernel cannot be compiled.
        """
        if self._inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "parameters were made in torch.inference_mode, and can be updated only there; make them outside of it"
            )
        sweep, pattern = self.sweep, self._pattern
        seen = self.lists.as_seen(tensors, shards)
        if not sweep.table.look(seen):
            seen = self._take(tensors, shards)
        absent = sweep.table.absent
        if len(absent) == self.count:
            return None
        own, counts = {}, {}
        for name, each, where in self._numbers:
            mine = numbers[where]
            counts[name] = each, mine, each.read(mine, absent, ahead)
            if name in self._scalars:
                own[name] = counts[name][-1]
        if pattern is None or pattern.absent != absent or not pattern.holds(own):
            pattern = self._find_pattern(absent, own)
        sets = uniforms_of(self.rule, optimizer, pattern.groups, own, self._rounded)
        for name, at in self._carried.items():
            each, mine, _ = counts[name]
            coming = np.asarray(sets)[pattern.sets, at]
            each.announce(mine, coming, absent, ahead)
            counts[name] = each, mine, coming
        if absent or self._loose or self._inference:
            written = self._written(optimizer, tensors, absent)
        else:
            written = (*tensors[: self.count], *optimizer.store.versions.counters)  # type: ignore[arg-type]
        plan = WHOLE if self.route is None else self.route.plan(sweep.table.host, absent)
        ready = sweep.ready(plan)
        sweep.set_scalars(sets, self._seeds(sets, pattern, counts) if sweep.stored.placed else 0)
        return Update(
            sweep, ready, sweep.table.host.stamp, self.lists, tensors, seen, pattern.absent, tuple(counts.values()),
            sets, self.route, plan, written,
        )  # fmt: skip

    def _take(self, tensors: Tensors, shards: Grads) -> Tensors:
        """Let the table look at each tensor, and say where it is now; returns the tensors as kernels see them."""
        seen, table = self.lists.as_seen(tensors, shards), self.sweep.table
        try:
            self.sweep.take(self._cut(seen))
        except LayoutError:
            if not self.lists.lay_out_gradients():
                raise
            seen = self.lists.as_seen(tensors, shards)
            self.sweep.take(self._cut(seen))
        table.let_go()
        table.remember(seen)
        return seen

    def _seeds(self, sets: Uniforms, pattern: Pattern, counts: Mapping[str, Count]) -> Values:
        """For each set of hyperparameters its parameters' step, so that a run that goes on rounds as one that did not
        stop; 0 where no steps are counted."""
        seeds = np.zeros(len(sets))
        if "step" in counts:
            present = np.setdiff1d(np.arange(self.count), pattern.absent)
            seeds[pattern.sets[present]] = np.broadcast_to(counts["step"][-1], self.count)[present]
        return seeds

    def _written(self, optimizer: RuleOptimizer, tensors: Any, absent: Sequence[int]) -> Numerals:
        """The tensors whose version counters a step raises."""
        away, first = set(absent), 2 * self.count
        written = (
            *(p for i, p in enumerate(tensors[: self.count]) if i not in away),
            *optimizer.store.versions.counters,
            *(local(tensors[first + i]) for i in self._loose if i % self.count not in away),
        )
        return tuple([t for t in written if not t.is_inference()])

    def _find_pattern(self, absent: list[int], own: Mapping[str, Values | float]) -> Pattern:
        """Which rows share hyperparameters: those of one group whose ``own`` ones are alike."""
        self._pattern = None  # until all is as it is found: what fails between here and there is looked for again
        pattern, table = find_pattern(self._groups, absent, own), self.sweep.table
        if pattern.used > len(table.host.scalars):  # parameters have begun to differ in their own ones
            table.make_room(min(2 * pattern.used, self.count))
        table.assign_sets(pattern.sets)
        self._pattern = pattern
        return pattern


@functools.lru_cache(maxsize=256)
def _same(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """One tuple for all buckets that are alike: there may be thousands."""
    return items


@functools.lru_cache(maxsize=256)
def _one(i: int) -> slice:
    return slice(i, i + 1)


def _runs_beside_python(device: torch.device) -> bool:
    """Whether other threads run while a kernel does, so that it must keep alive what it writes to, whatever they do."""
    return device.type == "cpu"


def _numbers(
    optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int]
) -> tuple[tuple[str, ScalarState, slice], ...]:
    """What each of the members has for itself: its name, and where its tensors are among all numbers of the bucket."""
    rule, count = members[0].rule, len(members)
    found = []
    for i, name in enumerate(number_names(optimizer, rule)):
        kind = StepCounts if name == "step" and optimizer.has_step else ScalarState
        where = slice(i * count, (i + 1) * count) if count > 1 else _one(i)
        found.append((name, kind([m.entry[name] for m in members], shared), where))
    if not optimizer.has_step and "step" in rule.scalars:
        # Where state keeps no count, a parameter whose state is made now has no steps behind it, another one has.
        found = [("step", UnsavedStepCounts([not m.missing or m.again for m in members]), slice(0)), *found]
    return tuple(found)


def _memories(members: Sequence[Member]) -> list[int]:
    """For each, a number of the memory that its parameter lies in: those that overlap have the same.

    Of a parameter with gaps only the first element counts, as others may lie between its own.
    """
    params = [m.shard for m in members]
    start = np.array([p.data_ptr() for p in params], np.int64)
    sizes = [p.nbytes if is_dense(p) else p.itemsize for p in params]
    order = np.argsort(start, kind="stable")
    ends = np.maximum.accumulate((start + np.array(sizes, np.int64))[order])
    found = np.empty(len(members), np.int64)
    found[order] = np.cumsum(np.concatenate([[True], start[order][1:] >= ends[:-1]])[: len(members)])
    return found.tolist()


def _take_turns(members: Iterable[Member], memory: Sequence[int]) -> None:
    """Let each that has the memory or a number of another wait for it: its rule takes what that one's leaves."""
    free: dict[tuple[str, int], int] = {}
    for member, number in zip(members, memory, strict=True):
        has = [("memory", number), *(("number", member.entry[name].data_ptr()) for name in member.rule.carried)]
        member.turn = max(member.turn, *(free.get(one, 0) for one in has))
        free.update(dict.fromkeys(has, member.turn + 1))
