"""One launch of an optimizer step: parameters of one rule, device and set of formats, with their pointer table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...formats.format import Format
from ...launch.factor import Factor
from ...launch.route import Route, route
from ...launch.sweep import Sweep
from ...paging.visits import WHOLE
from ...tables.checks import LayoutError
from ...tables.columns import Tensors
from ...tables.shards import first_element, local
from ...transports.by_value import StructTransport
from ...transports.choose import TransportOption, create
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead, NumberTensors, UnsavedStepCounts, number_names
from .device_numbers import DeviceNumbers
from .host_numbers import HostNumbers
from .kernel_views import KernelViews
from .members import Grads, Member
from .update import Update

_T = TypeVar("_T")


class Bucket:
    """The parameters of one launch: their pointer table, and all else that stays the same from step to step.

    A bucket keeps no parameter, gradient or state alive: :meth:`prepare` is given the tensors.

    Args:
        members: the parameters. All have one rule, and in each list one format.
        shared: addresses of numbers that several parameters share (see :class:`ScalarState`).
        shards: local gradients of DTensors.
        on_device: whether numbers stay on the device.
        factor: by what gradients are multiplied; None: they are taken as they are.
        turns: when gradients are expected, by the number of their parameter, if they come one by one: the table skips
            every row until somebody writes it, and goes by value; None: all are there in each step.

    Attributes:
        keys: names of the state columns, in the rule's order.
        names: names of the parameters' numbers.
        positions: of the members among all parameters of the optimizer.
        numbers: where hyperparameters and step counts come from.
    """

    __slots__ = (
        "_comes", "_inference", "_own_counters", "_turn", "count", "keys", "lists", "names", "numbers", "positions",
        "route", "rule", "sweep",
    )  # fmt: skip

    def __init__(
        self,
        optimizer: RuleOptimizer,
        members: Sequence[Member],
        shared: set[int],
        shards: Grads,
        on_device: bool,
        factor: Factor | None = None,
        turns: Mapping[int, int] | None = None,
    ) -> None:
        self.rule, self.count = members[0].rule, len(members)
        self._comes, self._turn = turns is not None, members[0].turn
        self.positions = tuple([m.index for m in members])
        self.keys, self.names = tuple(members[0].columns), number_names(optimizer, self.rule)
        # A table whose numbers stay on the device lies there, too: its chunks are cut as those of a copied one.
        transport: TransportOption = "memcpy" if on_device else optimizer.transport
        order, last = (optimizer.first_use, False) if turns is None else (turns, True)
        if turns is not None and not on_device:
            transport = StructTransport
        self.lists = KernelViews(members, self.keys)
        tensors, formats = self.tensors_of(members), (members[0].form, None, *members[0].formats[2:])
        firsts = [first_element(m.param) or 0 for m in members] if members[0].draws else None
        state = self._cut(self.lists.state_as_seen(members, self.keys))

        def bind() -> tuple[Route | None, Sweep, Tensors]:
            lists = self._cut(seen := self.lists.as_seen(tensors, shards))
            use = [order.get(m.index, -1) for m in members] if order else None
            pages, device = route(optimizer.store, lists[0], state, use, last), lists[0][0].device
            rows, geometry = (pages.rows, pages.geometry) if pages else (None, None)
            sweep = Sweep(
                self.rule, [*lists, *state], formats=formats, sets=min(2 * len({m.group for m in members}), self.count),
                transport=create(transport, device.index) if device.type == "cuda" else transport,
                blocks=optimizer.blocks, rows=rows, geometry=geometry, numbers=[m.index for m in members],
                firsts=firsts, factor=factor,
            )  # fmt: skip
            return pages, sweep, seen

        self.route, self.sweep, seen = self._with_gradient_copies(bind)
        self.sweep.table.remember(seen)
        self.sweep.table.let_go()
        if self._comes:
            self.sweep.formats = members[0].formats  # the table has no gradient that would tell
        self.numbers = (DeviceNumbers if on_device else HostNumbers)(optimizer, members, shared, self.sweep)
        own = [local(m.entry[key]) for key in self.keys for m in members]
        # State that does not share the store's version counters: a step raises these counters one by one.
        self._own_counters = tuple(optimizer.store.versions.raise_all(own))
        written: Any = (*seen[: self.count], *[own[i] for i in self._own_counters])
        self._inference = any(map(torch.Tensor.is_inference, written))

    @property
    def as_it_is(self) -> bool:
        """Whether kernels take all tensors as they are, and versions rise with parameters and the store's counters."""
        return self.lists.as_they_are and not self._own_counters and not self._inference

    @property
    def takes_them_one_by_one(self) -> bool:
        """Whether gradients may come one by one: nothing is copied around a launch, and its numbers do not depend on
        which gradients there will be."""
        on_host = isinstance(self.numbers, HostNumbers) and not self.numbers.takes_tensors
        return self._comes and on_host and self.lists.direct and not self._turn

    @property
    def counts_anew(self) -> bool:
        """Whether steps are counted here alone: a bucket that takes its place begins to count."""
        numbers = self.numbers
        return isinstance(numbers, HostNumbers) and any(isinstance(s, UnsavedStepCounts) for s in numbers.states)

    def tensors_of(self, members: Sequence[Member]) -> Tensors:
        """Return ``tensors`` of :meth:`prepare` for this bucket's members: parameters, gradients, state by column."""
        state = [m.entry[key] for key in self.keys for m in members]
        grads = [None if self._comes else m.param.grad for m in members]
        return (*(m.param for m in members), *grads, *state)

    def numbers_of(self, members: Sequence[Member]) -> NumberTensors:
        """Return ``numbers`` of :meth:`prepare` for this bucket's members, name by name."""
        return tuple([m.entry[name] for name in self.names for m in members])

    def compile(self, formats: tuple[Format, ...]) -> None:
        """Compile the kernel for ``formats`` now: tables of parameters without gradients do not know theirs yet."""
        self.sweep.formats = formats
        self.sweep.compile()
        self.numbers.compile()

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
            ValueError: gradients come one by one, and parameters are not as they were; make the bucket anew.
        """
        if self._inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "parameters were made in torch.inference_mode, and can be updated only there; make them outside of it"
            )
        if self._comes:
            return self._prepare_coming(optimizer, tensors, numbers, ahead)
        sweep, table = self.sweep, self.sweep.table
        seen = self.lists.as_seen(tensors, shards)
        if not table.look(seen):
            seen = self._take(tensors, shards)
        if len(absent := table.absent) == self.count:
            return None
        now = self.numbers.prepare(optimizer, numbers, ahead)
        written: NumberTensors
        if absent or self._own_counters or self._inference:
            written = (*self._written(optimizer, tensors, absent), *now.written)
        else:
            written = (*tensors[: self.count], *optimizer.store.versions.counters, *now.written)  # type: ignore[arg-type]
        plan = WHOLE if self.route is None else self.route.plan(table.host, absent)
        ready = sweep.ready(plan)
        if len(now.sets):
            sweep.set_scalars(now.sets, now.seeds)
        return Update(
            sweep, ready, table.host.stamp, self.lists, tensors, seen, absent[:], now.counts, now.sets, self.route,
            plan, written,
        )  # fmt: skip

    def _prepare_coming(
        self, optimizer: RuleOptimizer, tensors: Tensors, numbers: NumberTensors, ahead: Ahead
    ) -> Update | None:
        """:meth:`prepare` before the gradients are there: numbers are those of a step that all of them take."""
        sweep, table, on_host = self.sweep, self.sweep.table, self.numbers
        if not self.takes_them_one_by_one or not isinstance(on_host, HostNumbers):
            return None
        seen = self.lists.as_seen((*tensors[: self.count], *[None] * self.count, *tensors[2 * self.count :]), {})
        if not table.look(seen):
            raise ValueError("parameters have changed since this table was made")
        now = on_host.prepare(optimizer, numbers, ahead, absent=[])
        ready = sweep.ready(())
        sweep.set_scalars(now.sets, now.seeds)
        return Update(
            sweep, ready, table.host.stamp, self.lists, tensors, seen, [], now.counts, now.sets, self.route, (), ()
        )

    def follow(self, tensors: Tensors) -> None:
        """Write today's addresses into the table of a captured launch.

        Raises ValueError or TypeError if a gradient does not fit its parameter, or has other strides.
        """
        seen = tensors[: 2 * self.count]
        if not self.sweep.table.look(seen):
            self._refresh(seen)

    def _take(self, tensors: Tensors, shards: Grads) -> Tensors:
        """Check every tensor and write its address into the table; return what :meth:`KernelViews.as_seen` returns."""
        return self._with_gradient_copies(lambda: self._refresh(self.lists.as_seen(tensors, shards)))

    def _refresh(self, seen: Tensors) -> Tensors:
        self.sweep.refresh(self._cut(seen))
        self.sweep.table.let_go()
        return seen

    def _with_gradient_copies(self, act: Callable[[], _T]) -> _T:
        """Return ``act()``; if strides do not fit, copy gradients with other strides from now on and call it again."""
        try:
            return act()
        except LayoutError:
            if not self.lists.lay_out_gradients():
                raise
            return act()

    def _written(self, optimizer: RuleOptimizer, tensors: Any, absent: Sequence[int]) -> NumberTensors:
        """Return the tensors whose version counters a step raises."""
        away = set(absent)
        params = (p for i, p in enumerate(tensors[: self.count]) if i not in away)
        return (*(p for p in params if not p.is_inference()), *self.written_state(optimizer, tensors, absent))

    def written_state(self, optimizer: RuleOptimizer, tensors: Any, absent: Sequence[int]) -> NumberTensors:
        """Return the tensors whose version counters a step raises beside those of parameters."""
        away, first = set(absent), 2 * self.count
        written = (
            *optimizer.store.versions.counters,
            *(local(tensors[first + i]) for i in self._own_counters if i % self.count not in away),
        )
        return tuple([t for t in written if not t.is_inference()])
