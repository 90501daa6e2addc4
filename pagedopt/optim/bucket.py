"""One launch's share of an optimizer: parameters of one rule, device and dtypes, with their table and step counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..launch.route import route
from ..launch.sweep import Sweep
from ..tables.checks import LayoutError
from ..tables.columns import TensorList, Tensors
from .lists import Lists
from .members import Member
from .owner import Owner
from .scalars import Pattern, Uniforms, uniforms_of
from .steps import Counts, Steps


class Bucket:
    """Parameters that one launch updates.

    Args:
        optimizer: whose groups and options.
        members: the parameters; they have one rule and, list by list, one dtype.
        shared: addresses of step counts that stand for several parameters (see :class:`Steps`).
    """

    def __init__(self, optimizer: Owner, members: Sequence[Member], shared: set[int]) -> None:
        self.rule = members[0].rule
        self.params = tuple(m.param for m in members)
        self.groups = np.array([m.group for m in members], np.int64)
        self.lists = Lists(members)
        self.sets = 2 * len(set(self.groups.tolist()))
        self.route = route(optimizer.store, self.lists.params, self.lists.state)
        self.sweep = self._sweep(optimizer, self.lists.grads(laid_out=True))
        self._steps = Steps([m.entry["step"] for m in members], shared) if optimizer.has_step else None
        # Where a rule keeps no count, a parameter whose state is made now has no steps behind it, another one has.
        self._counts: Counts = np.array([not m.missing or m.again for m in members], np.float64)
        self._expected = np.full(len(members), np.nan)
        self._absent: list[int] = []
        self._compiled: tuple[torch.dtype, ...] | None = None
        self._pattern: Pattern = []
        self._scalars: Uniforms = []
        state = [m.entry[name] for name in members[0].names for m in members]
        written = [*self.params, *optimizer.store.version_counters(state)]
        self._written = [t for t in written if not t.is_inference()]
        self.let_go()

    @classmethod
    def partition(cls, optimizer: Owner, members: Sequence[Member]) -> list[Bucket]:
        """Sort all parameters by what a launch must have in common, one that stands twice into launches that follow."""
        found: dict[tuple[Any, ...], list[Member]] = {}
        for member in sorted(members, key=lambda m: m.turn):
            found.setdefault((member.turn, member.rule, member.param.device, member.dtypes), []).append(member)
        steps = [m.entry["step"].data_ptr() for m in members] if optimizer.has_step else []
        once: set[int] = set()
        shared = {at for at in steps if at in once or once.add(at)}  # type: ignore[func-returns-value]
        return [cls(optimizer, each, shared) for each in found.values()]

    def _sweep(self, optimizer: Owner, grads: TensorList) -> Sweep:
        rows, shape = (self.route.rows, self.route.geometry) if self.route else (None, None)
        lists = [self.lists.params, grads, *self.lists.state]
        return Sweep(
            self.rule, lists, transport=optimizer.transport, sets=self.sets, blocks=optimizer.blocks, rows=rows,
            geometry=shape,
        )  # fmt: skip

    def prepare(self, optimizer: Owner, ahead: dict[int, int]) -> None:
        """Take addresses, step counts and hyperparameters as they are now, and compile: all of a step that may fail.

        Args:
            ahead: see :meth:`Steps.read`.

        Raises:
            ValueError, TypeError: see :meth:`PointerTable.refresh`.
            CompileError: the kernel cannot be compiled.
        """
        self.sweep.begun = False
        if self.lists.odd:
            self.lists.take_params()
        grads = self.lists.grads()
        try:
            self.sweep.refresh([self.lists.params, grads])
        except LayoutError:
            grads = self.lists.grads(laid_out=True)
            self.sweep.refresh([self.lists.params, grads])
        absent = self.sweep.table.absent
        if len(absent) == len(self.params):
            return
        if self._steps is not None:
            self._counts = self._steps.read(absent, ahead)
        if absent != self._absent or not (self._counts == self._expected).all():
            self._find_pattern(optimizer, absent, grads)
        self._scalars = uniforms_of(self.rule, optimizer, self._pattern, self._counts)
        if self._compiled is not self.sweep.dtypes:
            self.sweep.compile()
            self._compiled = self.sweep.dtypes

    def launch(self) -> None:
        """Launch the prepared update, and count it."""
        absent = self.sweep.table.absent
        if len(absent) == len(self.params):
            return
        self.lists.fill()
        if self.route is None:
            self.sweep.launch(self._scalars)
        else:
            self.sweep.launch(self._scalars, self.route.plan(self.sweep.table.host, absent), self.route.mover())
        self.lists.bring_back()
        self._count(absent)

    def _count(self, absent: list[int]) -> None:
        self._expected = self._counts + 1
        if absent:
            self._expected[absent] -= 1
        if self._steps is None:
            self._counts = self._expected.copy()
        else:
            self._steps.count(absent)
        written = self._written
        if absent:
            away = {id(self.params[i]) for i in absent}
            written = [t for t in written if id(t) not in away]
        torch.autograd.graph.increment_version(written)

    def let_go(self) -> None:
        """Hold gradients no longer: their memory is the user's to give back."""
        self.sweep.table.let_go(1)

    def _find_pattern(self, optimizer: Owner, absent: list[int], grads: Tensors) -> None:
        """Which rows share hyperparameters: those of one group with as many steps behind them."""
        counts = self._counts if "step" in self.rule.scalars else np.zeros(len(self.groups))
        _, rank = np.unique(counts.view(np.int64), return_inverse=True)  # bits: NaN is a count like any other
        keys = self.groups * len(rank) + rank
        present = np.setdiff1d(np.arange(len(keys)), absent)
        _, first, inverse = np.unique(keys[present], return_index=True, return_inverse=True)
        if len(first) > self.sets:  # parameters have begun to differ in their number of steps
            self.sets = 2 * len(first)
            self.sweep = self._sweep(optimizer, grads)
            self._compiled = None
        rows = present[first]  # in the order of groups
        ends = np.flatnonzero(np.diff(self.groups[rows])) + 1
        parts = np.split(rows, ends)
        self._pattern = [(int(self.groups[p[0]]), int(p[0]) if len(p) == 1 else p) for p in parts]
        self._absent = absent
        sets = np.zeros(len(keys), np.int64)
        sets[present] = inverse
        self.sweep.table.assign_sets(sets)
