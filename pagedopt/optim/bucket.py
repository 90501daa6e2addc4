"""One launch's share of an optimizer: parameters of one rule, device and formats, with their table and numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..formats.format import Format
from ..launch.route import route
from ..launch.sweep import Sweep
from ..tables.checks import LayoutError
from ..tables.columns import TensorList, Tensors, is_dense
from ..tables.shards import local
from ..transports.choose import pooled
from .lists import Lists
from .members import Grads, Member
from .owner import Owner
from .scalars import Pattern, Uniforms, uniforms_of
from .steps import Ahead, KeptSteps, Numbers, Steps, Values, number_names


class Bucket:
    """Parameters that one launch updates.

    Args:
        optimizer: whose groups and options.
        members: the parameters; they have one rule and, list by list, one format.
        shared: addresses of numbers that stand for several parameters (see :class:`Numbers`).
        shards: see :meth:`Lists.grads`.
    """

    __slots__ = (
        "_absent", "_compiled", "_inference", "_leaders", "_numbers", "_pattern", "_scalars", "_sets", "_written",
        "groups", "lists", "params", "route", "rule", "sets", "sweep",
    )  # fmt: skip

    def __init__(self, optimizer: Owner, members: Sequence[Member], shared: set[int], shards: Grads) -> None:
        self.rule = members[0].rule
        self.groups = tuple([m.group for m in members])
        self.lists = Lists(members)
        self.params = self.lists.everyone
        self.sets = min(2 * len(set(self.groups)), len(members))
        self.route = route(optimizer.store, self.lists.params, self.lists.state)
        formats = (None, None, *members[0].formats[2:])
        self.sweep = self._sweep(optimizer, self.lists.grads(shards, laid_out=True), formats, self.sets)
        self._numbers = _numbers(optimizer, members, shared)
        self._absent: list[int] | None = None
        self._sets = self._leaders = _zeros(len(members))
        self._compiled: tuple[Format, ...] | None = None
        self._pattern: Pattern = ()
        self._scalars: Uniforms = ()
        state = [local(m.entry[key]) for key in members[0].kept for m in members]
        written = [*self.params, *optimizer.store.versions.of(state)]
        self._written = tuple([t for t in written if not t.is_inference()])
        self._inference = len(self._written) < len(written)
        self.let_go()

    @classmethod
    def partition(cls, optimizer: Owner, members: Sequence[Member], shards: Grads) -> list[Bucket]:
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
        return [cls(optimizer, each, shared, shards) for each in found.values()]

    def _sweep(self, optimizer: Owner, grads: TensorList, formats: Sequence[Format | None], sets: int) -> Sweep:
        rows, shape = (self.route.rows, self.route.geometry) if self.route else (None, None)
        lists = [self.lists.params, grads, *self.lists.state]
        device, transport = self.params[0].device, optimizer.transport
        return Sweep(
            self.rule, lists, formats=formats, sets=sets,
            transport=pooled(transport, device.index) if device.type == "cuda" else transport,
            blocks=optimizer.blocks, rows=rows, geometry=shape,
        )  # fmt: skip

    def prepare(self, optimizer: Owner, ahead: Ahead, shards: Grads) -> None:
        """Take addresses, numbers and hyperparameters as they are now, and compile: all of a step that may fail.

        Args:
            ahead: see :meth:`Numbers.read`.
            shards: see :meth:`Lists.grads`.

        Raises:
            RuntimeError: parameters were made in ``torch.inference_mode``, and this is outside of it (as torch).
            ValueError, TypeError: see :meth:`PointerTable.refresh`.
            CompileError: the kernel cannot be compiled.
        """
        self.sweep.begun = False
        if self._inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "parameters were made in torch.inference_mode, and can be updated only there; make them outside of it"
            )
        if self.lists.odd:
            self.lists.take_params()
        else:
            self.sweep.table.check(0)
        grads = self.lists.grads(shards)
        try:
            self.sweep.refresh([self.lists.params, grads])
        except LayoutError:
            grads = self.lists.grads(shards, laid_out=True)
            self.sweep.refresh([self.lists.params, grads])
        absent = self.sweep.table.absent
        if len(absent) == len(self.params):
            return
        alike, own, scalars = absent == self._absent, {}, self.rule.scalars
        for name, numbers in self._numbers:
            values = numbers.coming = numbers.read(absent, ahead)
            if name in scalars:
                own[name] = values
                alike = alike and (len(values) == 1 or values.tobytes() == values[self._leaders].tobytes())
        if not alike:
            self._find_pattern(optimizer, absent, grads, own)
        single = self.params[0].is_cuda and self.sweep.arithmetic is torch.float32
        rounded = optimizer.rounded_on_cuda if single else ()
        self._scalars = uniforms_of(self.rule, optimizer, self._pattern, own, rounded)
        for name, numbers in self._numbers:
            if name in self.rule.carried:
                numbers.coming = np.asarray(self._scalars)[self._sets, self.rule.carried[name]]
                numbers.announce(absent, ahead)
        if self._compiled is not self.sweep.formats:
            self.sweep.compile()
            self._compiled = self.sweep.formats

    def launch(self) -> None:
        """Launch the prepared update, and count it."""
        absent = self.sweep.table.absent
        if len(absent) == len(self.params):
            return
        self.lists.fill()
        seeds = self._seeds(absent) if self.sweep.stored.placed else 0
        if self.route is None:
            self.sweep.launch(self._scalars, seeds=seeds)
        else:
            plan = self.route.plan(self.sweep.table.host, absent)
            self.sweep.launch(self._scalars, plan, self.route.mover(), seeds)
        self.lists.bring_back()
        self._count(absent)

    def _seeds(self, absent: list[int]) -> Values:
        """For each set of hyperparameters its parameters' step, so that a run that goes on rounds as one that did not
        stop; 0 where no steps are counted."""
        seeds = np.zeros(len(self._scalars))
        for name, numbers in self._numbers:
            if name == "step":
                present = np.setdiff1d(np.arange(len(self.params)), absent)
                seeds[self._sets[present]] = numbers.coming[present]
        return seeds

    def _count(self, absent: list[int]) -> None:
        for _, numbers in self._numbers:
            numbers.write(absent)
        written = self._written
        if absent:
            away = {id(self.params[i]) for i in absent}
            written = tuple([t for t in written if id(t) not in away])
        torch.autograd.graph.increment_version(written)

    def let_go(self) -> None:
        """Hold gradients no longer: their memory is the user's to give back.  Nor what was prepared."""
        self.sweep.table.let_go(1)
        self._scalars = ()

    def _find_pattern(self, optimizer: Owner, absent: list[int], grads: Tensors, own: Mapping[str, Values]) -> None:
        """Which rows share hyperparameters: those of one group whose ``own`` ones are alike."""
        self._absent = None  # until all is as it is found: what fails between here and there is looked for again
        groups = keys = np.array(self.groups, np.int64)
        for values in own.values():
            distinct, rank = np.unique(
                values.view(np.int64), return_inverse=True
            )  # bits: NaN is a value like any other
            keys = keys * len(distinct) + rank
        present = np.setdiff1d(np.arange(len(keys)), absent)
        _, first, inverse = np.unique(keys[present], return_index=True, return_inverse=True)
        if len(first) > self.sets:  # parameters have begun to differ in their own ones
            sets = min(2 * len(first), len(keys))
            sweep, self._compiled = self._sweep(optimizer, grads, self.sweep.stored.given, sets), None
            self.sweep, self.sets = sweep, sets
        rows = present[first]  # in the order of groups
        ends = np.flatnonzero(np.diff(groups[rows])) + 1
        parts = np.split(rows, ends)
        self._pattern = tuple([(int(groups[p[0]]), int(p[0]) if len(p) == 1 else p) for p in parts])
        if len(rows) == 1 and not absent:
            self._sets = self._leaders = _zeros(len(keys))
        else:
            self._sets = np.zeros(len(keys), np.int64)
            self._sets[present] = inverse
            self._leaders = np.arange(len(keys))
            self._leaders[present] = rows[inverse]
        self.sweep.table.assign_sets(self._sets)
        self._absent = absent


@functools.lru_cache(maxsize=16)
def _zeros(count: int) -> npt.NDArray[np.int64]:
    """One for all buckets of so many parameters; to read."""
    found = np.zeros(count, np.int64)
    found.flags.writeable = False
    return found


def _numbers(optimizer: Owner, members: Sequence[Member], shared: set[int]) -> tuple[tuple[str, Numbers], ...]:
    """What each of the members has for itself, with its name."""
    rule = members[0].rule
    found = [(name, Numbers([m.entry[name] for m in members], shared)) for name in rule.carried]
    if optimizer.has_step:
        found = [("step", Steps([m.entry["step"] for m in members], shared)), *found]
    elif "step" in rule.scalars:
        # Where state keeps no count, a parameter whose state is made now has no steps behind it, another one has.
        found = [("step", KeptSteps([not m.missing or m.again for m in members])), *found]
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
