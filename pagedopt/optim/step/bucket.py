"""One launch of an optimizer step: parameters of one rule, device and set of formats, with their pointer table."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

from ...formats.format import Format
from ...launch.route import Route, route
from ...launch.sweep import Sweep
from ...paging.visits import WHOLE
from ...tables.checks import LayoutError
from ...tables.columns import Tensors, is_dense
from ...tables.shards import local
from ...transports.choose import Kind, pooled
from ..state.group_options import seed_word
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead, NumberTensors, ScalarState, StepCounts, UnsavedStepCounts, Values, number_names
from .hyperparameters import Pattern, find_pattern, uniforms_of
from .kernel_views import KernelViews
from .members import Grads, Member, interned
from .update import Count, Update

_T = TypeVar("_T")
#: The class of a member's bucket, given addresses of numbers that several parameters share.
KindOf = Callable[[Member, set[int]], "type[Bucket]"]
#: Cached: there may be thousands of buckets with the same slices.
_slice = functools.lru_cache(maxsize=256)(slice)


class Bucket:
    """The parameters of one launch: their pointer table, and all else that stays the same from step to step.

    A bucket keeps no parameter, gradient or state alive: :meth:`prepare` is given the tensors.

    Args:
        members: the parameters. All have one rule, and in each list one format.
        shared: addresses of numbers that several parameters share (see :class:`ScalarState`).

    Attributes:
        keys: names of the state columns, in the rule's order.
        names: names of the parameters' numbers.
        takes_state: whether :meth:`prepare` needs the state tensors themselves, and not only their addresses.
    """

    __slots__ = (
        "_carried", "_groups", "_inference", "_numbers", "_own_counters", "_pattern", "_scalars", "count",
        "keys", "lists", "names", "route", "rule", "sweep", "takes_state",
    )  # fmt: skip

    def __init__(self, optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int], shards: Grads) -> None:
        self.rule, self.count = members[0].rule, len(members)
        # Stored, because as properties of the rule each would be one more Python call in every prepare().
        self._scalars, self._carried = self.rule.scalars, self.rule.carried
        self.keys, self.names = interned(tuple(members[0].columns)), number_names(optimizer, self.rule)
        self._groups = tuple([m.group for m in members]) if len(members) > 1 else interned((members[0].group,))
        self.lists = KernelViews(members, self.keys)
        tensors, formats = self.tensors_of(members), (None, None, *members[0].formats[2:])
        state = self._cut(self.lists.state_as_seen(members, self.keys))

        def bind() -> tuple[Route | None, Sweep, list[torch.Tensor]]:
            lists = self._cut(self.lists.as_seen(tensors, shards))
            first_use = [optimizer.first_use.get(m.index, -1) for m in members] if optimizer.first_use else None
            way, device = route(optimizer.store, lists[0], state, first_use), lists[0][0].device
            transport = self._transport(optimizer)
            rows, geometry = (way.rows, way.geometry) if way else (None, None)
            sweep = Sweep(
                self.rule, [*lists, *state], formats=formats, sets=min(2 * len(set(self._groups)), self.count),
                transport=pooled(transport, device.index) if device.type == "cuda" else transport,
                blocks=optimizer.blocks, rows=rows, geometry=geometry, numbers=[m.index for m in members],
            )  # fmt: skip
            return way, sweep, lists[0]

        self.route, self.sweep, params = self._with_gradient_copies(bind)
        self.sweep.table.let_go()
        if self.lists.as_they_are:
            self.sweep.table.remember(tensors[: 2 * self.count])
        self._numbers = _numbers(optimizer, members, shared)
        self._pattern: Pattern | None = None
        own = [local(m.entry[key]) for key in self.keys for m in members]
        # State that does not share the store's version counters: a step raises these counters one by one.
        self._own_counters = tuple(optimizer.store.versions.raise_all(own))
        self._inference = any(map(torch.Tensor.is_inference, (*params, *[own[i] for i in self._own_counters])))
        by_tensor = bool(self._own_counters) or any(each.takes_tensors for _, each, _ in self._numbers)
        self.takes_state = _runs_beside_python(params[0].device) or not self.lists.plain or by_tensor

    @staticmethod
    def _transport(optimizer: RuleOptimizer) -> Kind:
        return optimizer.transport

    @staticmethod
    def partition(
        optimizer: RuleOptimizer, members: Sequence[Member], shards: Grads, kind: KindOf
    ) -> list[tuple[Bucket, list[Member]]]:
        """Divide members into launches.  Duplicates and parameters that share memory go into later launches.

        Args:
            kind: the class of a member's bucket.
        """
        memory = _memories(members)
        if len(set(memory)) < len(memory) or any(m.rule.carried for m in members):
            _take_turns(members, memory)
        found: dict[tuple[Any, ...], list[Member]] = {}
        formats_of = _FormatsOf()
        numbers = Counter(m.entry[name].data_ptr() for m in members for name in number_names(optimizer, m.rule))
        shared = {address for address, uses in numbers.items() if uses > 1}
        for member in sorted(members, key=attrgetter("turn")):
            of = kind(member, shared)
            alike = of, member.turn, member.rule, member.param.device, formats_of(member)
            found.setdefault(alike, []).append(member)
        return [(of(optimizer, each, shared, shards), each) for (of, *_), each in found.items()]

    def tensors_of(self, members: Sequence[Member]) -> Tensors:
        """Return ``tensors`` of :meth:`prepare` for this bucket's members: parameters, gradients, state by column."""
        state = [m.entry[key] for key in self.keys for m in members]
        return (*(m.param for m in members), *(m.param.grad for m in members), *state)

    def numbers_of(self, members: Sequence[Member]) -> NumberTensors:
        """Return ``numbers`` of :meth:`prepare` for this bucket's members, name by name."""
        return tuple([m.entry[name] for name in self.names for m in members])

    def compile(self, formats: tuple[Format, ...]) -> None:
        """Compile the kernel for ``formats`` now: tables of parameters without gradients do not know theirs yet."""
        self.sweep.formats = formats
        self.sweep.compile()

    def _cut(self, tensors: Sequence[Any]) -> list[Any]:
        """Split a concatenation of lists into the lists."""
        return [tensors[i : i + self.count] for i in range(0, len(tensors), self.count)]

    def prepare(
        self, optimizer: RuleOptimizer, tensors: Tensors, numbers: NumberTensors, ahead: Ahead, shards: Grads
    ) -> Update | None:
        """Return this launch of a step, with current addresses, numbers and hyperparameters; None: no gradients.

        Args:
            tensors: see :meth:`tensors_of`.
            numbers: see :meth:`numbers_of`.
            ahead: see :meth:`ScalarState.read`.

        Raises:
            RuntimeError: parameters were made in ``torch.inference_mode``, and this is outside of it (as torch).
            ValueError, TypeError, CompileError: see :meth:`PointerTable.refresh` and :meth:`Sweep.ready`.
        """
        seen = self._look(tensors, shards)
        sweep, pattern = self.sweep, self._pattern
        absent = sweep.table.absent
        if len(absent) == self.count:
            return None
        own, counts = {}, {}
        for name, each, where in self._numbers:
            mine = numbers[where]
            counts[name] = each, mine, each.read(mine, absent, ahead)
            if name in self._scalars:
                own[name] = counts[name][-1]
        apart = own  # what rows of one set must have in common
        if sweep.stored.placed and "step" in counts:
            apart = {**own, "step": counts["step"][-1]}
        if pattern is None or pattern.absent != absent or not pattern.holds(apart):
            pattern = self._find_pattern(absent, apart)
        sets = uniforms_of(self.rule, optimizer, pattern.groups, own)
        for name, at in self._carried.items():
            each, mine, _ = counts[name]
            coming = np.asarray(sets)[pattern.sets, at]
            each.announce(mine, coming, absent, ahead)
            counts[name] = each, mine, coming
        if absent or self._own_counters or self._inference:
            written = self._written(optimizer, tensors, absent)
        else:
            written = (*tensors[: self.count], *optimizer.store.versions.counters)  # type: ignore[arg-type]
        plan = WHOLE if self.route is None else self.route.plan(sweep.table.host, absent)
        ready = sweep.ready(plan)
        sweep.set_scalars(sets, self._seeds(optimizer, pattern, counts) if sweep.stored.placed else 0)
        return Update(
            sweep, ready, sweep.table.host.stamp, self.lists, tensors, seen, pattern.absent, tuple(counts.values()),
            sets, self.route, plan, written,
        )  # fmt: skip

    def _look(self, tensors: Tensors, shards: Grads) -> Tensors:
        """Write addresses that have changed into the table; return what :meth:`KernelViews.as_seen` returns."""
        if self._inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "parameters were made in torch.inference_mode, and can be updated only there; make them outside of it"
            )
        seen = self.lists.as_seen(tensors, shards)
        return seen if self.sweep.table.look(seen) else self._take(tensors, shards)

    def _take(self, tensors: Tensors, shards: Grads) -> Tensors:
        """Check every tensor and write its address into the table; return what :meth:`KernelViews.as_seen` returns."""

        def take() -> Tensors:
            seen = self.lists.as_seen(tensors, shards)
            self.sweep.take(self._cut(seen))
            return seen

        seen = self._with_gradient_copies(take)
        self.sweep.table.let_go()
        self.sweep.table.remember(seen)
        return seen

    def _with_gradient_copies(self, act: Callable[[], _T]) -> _T:
        """Return ``act()``; if strides do not fit, copy gradients with other strides from now on and call it again."""
        try:
            return act()
        except LayoutError:
            if not self.lists.lay_out_gradients():
                raise
            return act()

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

    def _written(self, optimizer: RuleOptimizer, tensors: Any, absent: Sequence[int]) -> NumberTensors:
        """Return the tensors whose version counters a step raises."""
        away, first = set(absent), 2 * self.count
        written = (
            *(p for i, p in enumerate(tensors[: self.count]) if i not in away),
            *optimizer.store.versions.counters,
            *(local(tensors[first + i]) for i in self._own_counters if i % self.count not in away),
        )
        return tuple([t for t in written if not t.is_inference()])

    def _find_pattern(self, absent: list[int], own: Mapping[str, Values | float]) -> Pattern:
        """Find which rows share hyperparameters, and write that into the table."""
        self._pattern = None  # until the table has the new one: if we fail before, the next step tries again
        pattern, table = find_pattern(self._groups, absent, own), self.sweep.table
        if pattern.used > len(table.host.scalars):  # parameters have begun to differ in their own hyperparameters
            table.make_room(min(2 * pattern.used, self.count))
        table.assign_sets(pattern.sets)
        self._pattern = pattern
        return pattern


class _FormatsOf:
    """Gives each member the number of its set of formats: equal sets have one number."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self._numbers: dict[tuple[Format, ...], int] = {}

    def __call__(self, member: Member) -> int:
        p, entry = member.param, member.entry
        grad, dtypes = p.grad, [entry[key].dtype for key in member.columns]
        alike = id(member.columns), p.dtype, None if grad is None else grad.dtype, *dtypes
        number = self._known.get(alike)
        if number is None:
            number = self._known[alike] = self._numbers.setdefault(member.formats, len(self._numbers))
        return number


def _runs_beside_python(device: torch.device) -> bool:
    """Return whether other threads may free state during a kernel (CPU kernels run without the GIL)."""
    return device.type == "cpu"


def _numbers(
    optimizer: RuleOptimizer, members: Sequence[Member], shared: set[int]
) -> tuple[tuple[str, ScalarState, slice], ...]:
    """Return (name, numbers, where their tensors are among all numbers of the bucket) for each name."""
    rule, count = members[0].rule, len(members)
    found = []
    for i, name in enumerate(number_names(optimizer, rule)):
        kind = StepCounts if name == "step" and optimizer.has_step else ScalarState
        found.append((name, kind([m.entry[name] for m in members], shared), _slice(i * count, (i + 1) * count)))
    if not optimizer.has_step and "step" in rule.scalars:
        # State has no step count: assume 0 steps so far if the parameter's state is made now, and 1 otherwise.
        found.insert(0, ("step", UnsavedStepCounts([not m.missing or m.again for m in members]), slice(0)))
    return tuple(found)


def _memories(members: Sequence[Member]) -> list[int]:
    """Return a number for each parameter's memory: parameters that overlap have the same."""
    # Of a parameter with gaps only the first element counts: others may lie between its elements.
    params = [m.shard for m in members]
    starts, sizes = [p.data_ptr() for p in params], [p.nbytes if is_dense(p) else p.itemsize for p in params]
    found, end, number = [0] * len(params), 0, 0
    for i in sorted(range(len(params)), key=starts.__getitem__):
        number += starts[i] >= end
        found[i], end = number, max(end, starts[i] + sizes[i])
    return found


def _take_turns(members: Iterable[Member], memory: Sequence[int]) -> None:
    """Give members that share memory or a number rising turns: each reads what the one before has written."""
    free: dict[tuple[str, int], int] = {}  # the first turn in which nobody uses it any more
    for member, its_memory in zip(members, memory, strict=True):
        uses = [("memory", its_memory), *(("number", member.entry[name].data_ptr()) for name in member.rule.carried)]
        member.turn = max(member.turn, *(free.get(one, 0) for one in uses))
        free.update(dict.fromkeys(uses, member.turn + 1))
