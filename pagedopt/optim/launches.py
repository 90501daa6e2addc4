"""The launches of a step: made anew when parameters or state are no longer what they were made for."""

from __future__ import annotations

from typing import Any

from ..rules import Rule
from ..system.interrupts import Uninterrupted
from ..tables.shards import local
from .bucket import Bucket
from .encoding import fill
from .members import Grads, Member, members, state_tensors
from .owner import Owner
from .steps import Ahead, Place, new_numbers, number_names
from .watch import Watch


class Launches:
    """All launches of an optimizer, and the state that they still have to put into ``optimizer.state``.

    Until :meth:`run` nothing of the optimizer has changed.

    Args:
        optimizer: whose.
        shards: see :meth:`Lists.grads`.

    Attributes:
        sharded: those of its parameters that are DTensors, each once, in an order that all processes have.

    Raises:
        KeyError, RuntimeError, ValueError, TypeError: see :func:`members` and :class:`Bucket`.
        MemoryError, torch.OutOfMemoryError: there is no room for new state.
    """

    __slots__ = ("_fresh", "_members", "_residents", "_rules", "_waiting", "_watch", "buckets", "sharded")

    def __init__(self, optimizer: Owner, shards: Grads) -> None:
        self._rules = _rules(optimizer)
        found, waiting = members(optimizer)
        self._waiting = tuple(waiting)
        self._fresh = tuple(m for m in found if m.is_new or m.missing or m.moved)
        optimizer.store.mind(state_tensors(optimizer), type(optimizer).__name__)
        _create(optimizer, found)
        self._members = tuple(found)
        self.sharded = tuple(dict.fromkeys(m.param for m in found if m.shard is not m.param))
        self._residents = optimizer.store.residents
        self.buckets = tuple(Bucket.partition(optimizer, found, shards))
        self._watch: Watch | None = None

    def current(self, optimizer: Owner) -> bool:
        """Whether they are for what state and groups hold now."""
        return (
            self._watch is not None
            and self._watch.same(optimizer)
            and _rules(optimizer) == self._rules
            and optimizer.store.residents == self._residents  # pages that others have a part of move with them
            and (not self._waiting or all(p.grad is None for p in self._waiting))
        )

    def prepare(self, optimizer: Owner, shards: Grads) -> None:
        """All of a step that may fail before anything has changed.

        Args:
            optimizer: whose.
            shards: see :meth:`Lists.grads`.

        Raises:
            ValueError, TypeError: a tensor is not as it was: launches for what it is now are to be made anew; or one
                cannot be used at all.
            CompileError: the kernel cannot be compiled.
        """
        ahead: Ahead = {}
        try:
            for bucket in self.buckets:
                bucket.prepare(optimizer, ahead, shards)
            optimizer.store.prepare()
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        for bucket in self.buckets:
            bucket.let_go()

    def run(self, optimizer: Owner) -> None:
        """Take the step.  Once its first launch has begun, it is finished and counted before a signal is handled.

        Raises:
            BaseException: what failed in the middle, or came with a second Ctrl-C; the optimizer is damaged then.
        """
        try:
            with Uninterrupted(gives_way=True), optimizer.store.using():
                self._launch(optimizer)
        finally:
            self._let_go()
        if self._watch is None:
            used = [local(m.entry[n]) for m in self._members for n in (*number_names(optimizer, m.rule), *m.kept)]
            self._watch = Watch(optimizer, used)
            self._members = ()  # of no use from now on

    def _launch(self, optimizer: Owner) -> None:
        optimizer.damaged = "a step ended in the middle"  # until it has not: who tears this, tears what would say so
        try:
            if self._fresh:
                self._put_state(optimizer)
            for bucket in self.buckets:
                bucket.launch()
        except BaseException as error:
            if any(bucket.sweep.begun for bucket in self.buckets):
                optimizer.damaged = f"a step failed in the middle ({type(error).__name__}: {error})"
            else:
                self._take_state_back(optimizer)
                optimizer.damaged = ""
            raise
        self._fresh = ()
        optimizer.damaged = ""

    def _put_state(self, optimizer: Owner) -> None:
        for member in self._fresh:
            entry = optimizer.state[member.param]
            for name, value in member.entry.items():
                entry.setdefault(name, value)
                if entry[name] is None or name in member.moved:
                    entry[name] = value

    def _take_state_back(self, optimizer: Owner) -> None:
        for member in self._fresh:
            entry = optimizer.state.get(member.param, {})
            for name in member.missing:
                entry.pop(name, None)
            entry.update(member.moved)
            if not entry:
                optimizer.state.pop(member.param, None)


def _rules(optimizer: Owner) -> tuple[Rule, ...]:
    return tuple([optimizer.rule_of(group) for group in optimizer.param_groups])


def _create(optimizer: Owner, found: list[Member]) -> None:
    """Complete the entries of members with first state, one for all places in which a parameter stands."""
    entries: dict[int, dict[str, Any]] = {}
    firsts = []
    for member in found:
        member.entry = entries.setdefault(id(member.param), member.entry)
        if member.turn == 0 and (member.is_new or member.missing):
            firsts.append(member)
    wanted = [m.kept[n].wanted(m.param, n) for m in firsts for n in m.missing if n in m.kept]
    created = optimizer.store.create(wanted) if wanted else []
    if wanted:
        from .advice import tell_made  # loads what plans are made with: where state is made, and not before

        tell_made(optimizer, created)
    made = iter(created)
    groups = optimizer.param_groups
    numbers = iter(
        new_numbers([Place.of(groups[m.group], m.param) for m in firsts for n in m.missing if n not in m.kept])
    )
    for member in firsts:
        member.entry.update((name, next(made if name in member.kept else numbers)) for name in member.missing)
    if optimizer.initial:
        _fill(optimizer, firsts)


def _fill(optimizer: Owner, firsts: list[Member]) -> None:
    """Give new state, which is zero, its first value."""
    for member in firsts:
        for name, value in optimizer.initial.items():
            value = optimizer.param_groups[member.group][value] if isinstance(value, str) else value
            if value == 0:
                continue
            if name in member.missing and (name not in member.kept or member.kept[name].free):
                local(member.entry[name]).fill_(value)
                optimizer.store.drop()  # keeps to the budget while pages are touched that should not stay in memory
            elif columns := {key: of for key, of in member.kept.items() if of.name == name and key in member.missing}:
                form = next(iter(columns.values())).form
                fill(form, [member.entry[key] for key in columns], member.param, value, optimizer.store)
