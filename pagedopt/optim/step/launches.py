"""A prepared step: what each launch will do, and the new state that is still to be put into ``optimizer.state``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...placements.ready_arenas import ReadyArenas
from ...system.interrupts import Uninterrupted
from ..state.damage import whole
from ..state.rule_optimizer import RuleOptimizer, number_names
from ..state.scalar_state import Ahead
from .bucket import Bucket
from .device_numbers import DeviceNumbers
from .factor import FactorUpdate, StepFactor, factor_of
from .members import Grads, Member, members, reduced, sharded
from .plan import NO_SHARDS, OnDevice, Plan
from .seen import Found, Picks, Seen
from .update import Update


class Launches(NamedTuple):
    """The record of the last step: its pointer tables, and what the next step compares to know if they still fit.

    Attributes:
        seen: those that the tables are made for.
        picks: see :meth:`Seen.picks_for`.
        buckets: the launches, each with its table.
        residents: how many pages of each arena were on the device.
        sharded: indices of parameters that are DTensors.
        factor: by what gradients are multiplied; None: they are taken as they are.
    """

    seen: Seen
    picks: tuple[Picks, ...]
    buckets: tuple[Bucket, ...]
    residents: tuple[int, ...]
    sharded: tuple[int, ...]
    factor: StepFactor | None = None

    def still_hold(self, optimizer: RuleOptimizer) -> bool:
        """Return whether all tensors are what the tables were made for and lie where the tables say."""
        if (found := self.seen.compare(optimizer)) is None:
            return False
        for bucket, (rows, _, _) in zip(self.buckets, self.picks, strict=True):
            table = bucket.sweep.table
            stamp, tensors = table.host.stamp, (*rows(found.params), *rows(found.grads))
            if not table.look(bucket.lists.as_seen(tensors, NO_SHARDS)) or table.host.stamp != stamp:
                return False
        return True


class PreparedStep(NamedTuple):
    """A step after all checks, allocations and compilation, before its launches.  The optimizer is still unchanged.

    It is a value: it may be printed, run later, or dropped.

    Attributes:
        optimizer: whose step it is.
        updates: the launches, in their order.
        launches: what :meth:`run` leaves for the next step.
        ready: the arenas of state, and how many of their pages are resident.
        fresh: parameters whose new state is still to be put into ``optimizer.state``.
        factor: by what gradients are multiplied; None: they are taken as they are.
    """

    optimizer: RuleOptimizer
    updates: tuple[Update, ...]
    launches: Launches
    ready: ReadyArenas
    fresh: tuple[Member, ...] = ()
    factor: FactorUpdate | None = None

    def run(self, launch: Callable[[PreparedStep], object] | None = None) -> Launches:
        """Take the step.  Once its first launch has begun, it is finished and counted before a signal is handled.

        Args:
            launch: carries the updates out, or queues them, and counts them; None: now, on the current stream.

        Returns:
            :attr:`launches`.

        Raises:
            RuntimeError: another step has been prepared since, with other numbers or tensors; nothing was done.
            BaseException: a launch failed, or a second Ctrl-C came in the middle; the optimizer is then damaged.
        """
        for update in self.updates:
            if update.sweep.table.host.stamp != update.stamp:
                raise RuntimeError("another step was prepared since; prepare this one again")
            update.sweep.begun = False
        with Uninterrupted(gives_way=True), whole(self.optimizer, "a step", self._begun):
            try:
                updates = self.updates
                if self.factor is not None:  # first: a step under the forward forks from the current stream then
                    updates = self.factor.launch(self.optimizer, updates, self.launches.buckets)
                if launch is not None and updates:
                    launch(self if updates is self.updates else self._replace(updates=updates))
                else:
                    for update in updates:
                        update.launch(self.ready.arenas)
                if updates and self.fresh:  # a first step that is left out leaves no state, as torch's default
                    put_state(self.optimizer, self.fresh)
            except BaseException:
                if self._begun():  # it may hold new values: the next step must not take it for state of zeros
                    put_state(self.optimizer, self.fresh)
                raise
        return self.launches

    def _begun(self) -> bool:
        """Whether a launch has begun: part of the state may be new."""
        return any(update.sweep.begun for update in self.updates)


def prepare_again(
    optimizer: RuleOptimizer, known: Launches, found: Found, ready: ReadyArenas, shards: Grads = NO_SHARDS
) -> PreparedStep:
    """Prepare a step for the same objects as the last one, which :meth:`Seen.compare` has ``found``.

    Raises:
        ValueError, TypeError: a tensor has changed: only :func:`prepare_anew` can tell whether it can be used.
        CompileError: the kernel cannot be compiled.
    """
    ahead: Ahead = {}
    updates = []
    for bucket, (rows, state, numbers) in zip(known.buckets, known.picks, strict=True):
        tensors = (*rows(found.params), *rows(found.grads), *state(found.values))
        if update := bucket.prepare(optimizer, tensors, numbers(found.values), ahead, shards):
            updates.append(update)
    factor = None if known.factor is None else known.factor.prepare(optimizer)
    return PreparedStep(optimizer, tuple(updates), known, ready, factor=factor)


class Coming(NamedTuple):
    """Gradients that will come one by one.

    Attributes:
        expected: ids of their parameters.
        turns: when each is expected, by the number of its parameter.
    """

    expected: frozenset[int]
    turns: Mapping[int, int]


def prepare_anew(optimizer: RuleOptimizer, shards: Grads, coming: Coming | None = None) -> PreparedStep:
    """Prepare a step for the current contents of state and groups, and make the state that is missing.

    Args:
        coming: gradients that are not there yet; None: all are.  Such a step has no factor, and is not to be run: its
            updates are those of parameters that can be updated one by one.

    Raises:
        KeyError, RuntimeError, ValueError, TypeError: see :func:`members` and :class:`Bucket`.
        MemoryError, torch.OutOfMemoryError: there is no room for new state.
        CompileError: a kernel cannot be compiled.
    """
    everyone = members(optimizer, coming.expected if coming else ())
    times = None if coming else factor_of(optimizer)
    plan = Plan.of(optimizer, everyone, on_device(optimizer), shards, times, coming.turns if coming else None)
    updates = tuple([update for _, _, update in plan.prepare(shards)])
    buckets = tuple([bucket for bucket, _ in plan.launches])
    launches = Launches(
        plan.seen, plan.seen.picks_for(plan.launches), buckets, plan.ready.residents, everyone.sharded,
        plan.factor,
    )  # fmt: skip
    factor = None if plan.factor is None else plan.factor.prepare(optimizer)
    return PreparedStep(optimizer, updates, launches, plan.ready, plan.fresh, factor)


def on_device(optimizer: RuleOptimizer) -> OnDevice:
    """Return the function that tells whether a member's numbers stay on the device.

    Step counts that lie on a device, as with ``fused``, are read there in each step, and the host waits for none.
    """

    def stay(member: Member, shared: set[int]) -> bool:
        names = number_names(optimizer, member.rule)
        asked = names or optimizer.scaled or optimizer.param_groups[member.group].get("capturable")
        return bool(asked) and DeviceNumbers.takes(member, names, shared)

    return stay


def grads_of_shards(optimizer: RuleOptimizer, known: Launches | None, found: Found | None) -> Grads:
    """Return local gradients of DTensors; a collective call, which every process makes once in each step."""
    if known is None or found is None:
        return reduced(sharded(optimizer))
    return reduced([found.params[i] for i in known.sharded])


def put_state(optimizer: RuleOptimizer, fresh: tuple[Member, ...]) -> None:
    """Put new state into ``optimizer.state``."""
    for member in fresh:
        entry = optimizer.state[member.param]
        for name, value in member.entry.items():
            if entry.get(name) is None or name in member.moved:
                entry[name] = value
        optimizer.preallocated.pop(member.param, None)
