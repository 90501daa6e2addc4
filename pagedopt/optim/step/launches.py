"""A step before it happens: what each launch does, and the state that it still has to put into ``optimizer.state``."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from ...placements.store import Standing
from ...system.interrupts import Uninterrupted
from ...tables.columns import Tensors
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead
from .bucket import Bucket
from .changes import ObjectWatch
from .members import Grads, Member, members, reduced, sharded
from .new_state import create
from .update import Update

_resident = attrgetter("resident")
#: Gradients of shards where no parameter is a DTensor.
NO_SHARDS: Grads = {}


class Launches(NamedTuple):
    """What stays from one step to the next: a table for each launch, and what tells whether they still fit.

    Attributes:
        watch: knows the objects that they are for.
        buckets: each with its table.
        residents: how many pages of each arena were on the device.
        sharded: indices of parameters that are DTensors.
    """

    watch: ObjectWatch
    buckets: tuple[Bucket, ...]
    residents: tuple[int, ...]
    sharded: tuple[int, ...]


class PreparedStep(NamedTuple):
    """All of a step that may fail before anything has changed, done.  Until :meth:`run` the optimizer is as it was.

    It is a value: to print, to keep for later, or to drop.

    Attributes:
        optimizer: whose.
        updates: one for each launch, in their order.
        launches: what stays for the next step.
        standing: the arenas of state, and where their pages are.
        entries: of state, which it keeps alive.
        fresh: parameters whose state is still to be put into the optimizer's.
    """

    optimizer: RuleOptimizer
    updates: tuple[Update, ...]
    launches: Launches
    standing: Standing
    entries: tuple[Any, ...]
    fresh: tuple[Member, ...] = ()

    def run(self) -> Launches | None:
        """Take the step.  Once its first launch has begun, it is finished and counted before a signal is handled.

        Returns:
            what stays for the next one; None: nothing was done, as another optimizer has moved pages of which this one
            has a part since the step was prepared.

        Raises:
            RuntimeError: another step has been prepared since, with other numbers or tensors; nothing was done.
            BaseException: what failed in the middle, or came with a second Ctrl-C; the optimizer is damaged then.
        """
        for update in self.updates:
            if update.sweep.table.host.stamp != update.stamp:
                raise RuntimeError("another step was prepared since; prepare this one again")
            update.sweep.begun = False
        arenas, residents, held = self.standing
        with Uninterrupted(gives_way=True), held:
            if arenas and (*map(_resident, arenas),) != residents:
                return None
            self._launch()
        return self.launches

    def _launch(self) -> None:
        optimizer = self.optimizer
        try:
            # Set first: if we are interrupted, the text stays and says that the state is damaged.
            optimizer.damaged = "a step ended in the middle"
            if self.fresh:
                _put_state(optimizer, self.fresh)
            for update in self.updates:
                update.launch(self.standing.arenas)
        except BaseException as error:
            if any(update.sweep.begun for update in self.updates):
                optimizer.damaged = f"a step failed in the middle ({type(error).__name__}: {error})"
            else:
                if self.fresh:
                    _take_state_back(optimizer, self.fresh)
                optimizer.damaged = ""
            raise
        optimizer.damaged = ""


def prepare_again(
    optimizer: RuleOptimizer, known: Launches, found: Tensors, standing: Standing, shards: Grads = NO_SHARDS
) -> PreparedStep:
    """A step for the very objects of the last one.

    Args:
        known: what stayed from it.
        found: these objects, as :meth:`ObjectWatch.look` has them.
        standing: the store's.
        shards: gradients of DTensors.

    Raises:
        ValueError, TypeError: a tensor is not as it was: all is to be looked at again; or one cannot be used at all.
        CompileError: the kernel cannot be compiled.
    """
    ahead: Ahead = {}
    updates = []
    for bucket, (tensors, numbers) in zip(known.buckets, known.watch.picks, strict=True):
        update = bucket.prepare(optimizer, tensors(found), numbers(found), ahead, shards)
        if update is not None:
            updates.append(update)
    return PreparedStep(optimizer, tuple(updates), known, standing, (*optimizer.state.values(),))


def prepare_anew(optimizer: RuleOptimizer, shards: Grads) -> PreparedStep:
    """A step for what state and groups hold now, and for state that is made now.

    Args:
        shards: gradients of DTensors.

    Raises:
        KeyError, RuntimeError, ValueError, TypeError: see :func:`members` and :class:`Bucket`.
        MemoryError, torch.OutOfMemoryError: there is no room for new state.
        CompileError: a kernel cannot be compiled.
    """
    everyone = members(optimizer)
    fresh = tuple([m for m in everyone.found if m.is_new or m.missing or m.moved])
    create(optimizer, everyone.found)
    watch = ObjectWatch(optimizer, everyone)
    standing = optimizer.store.stand()
    buckets = Bucket.partition(optimizer, everyone.found, shards)
    watch.serve(buckets)
    ahead: Ahead = {}
    updates = [
        bucket.prepare(optimizer, bucket.tensors_of(of), bucket.numbers_of(of), ahead, shards) for bucket, of in buckets
    ]
    launches = Launches(watch, tuple([bucket for bucket, _ in buckets]), standing.residents, everyone.sharded)
    there = tuple([update for update in updates if update is not None])
    return PreparedStep(optimizer, there, launches, standing, tuple([m.entry for m in everyone.found]), fresh)


def grads_of_shards(optimizer: RuleOptimizer, known: Launches | None, found: Tensors | None) -> Grads:
    """Gradients of DTensors as their shards have them; all their processes call this once in each step."""
    if known is None or found is None:
        return reduced(sharded(optimizer))
    params: Any = found
    return reduced([params[i] for i in known.sharded])


def _put_state(optimizer: RuleOptimizer, fresh: tuple[Member, ...]) -> None:
    for member in fresh:
        entry = optimizer.state[member.param]
        for name, value in member.entry.items():
            entry.setdefault(name, value)
            if entry[name] is None or name in member.moved:
                entry[name] = value


def _take_state_back(optimizer: RuleOptimizer, fresh: tuple[Member, ...]) -> None:
    for member in fresh:
        entry: dict[str, Any] = optimizer.state.get(member.param, {})
        for name in member.missing:
            entry.pop(name, None)
        entry.update(member.moved)
        if not entry:
            optimizer.state.pop(member.param, None)
