"""A plan of steps: rows with all their state, cut into launches; and a step, prepared as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ..formats.floating import known, real_dtype
from ..formats.format import Format
from ..placements.ready_arenas import ReadyArenas
from ..rules.rule import check_rule
from ..system.interrupts import Uninterrupted
from ..system.look.build import compiled_look
from ..tables.columns import is_dense
from ..tables.shards import local
from .class_checks import check_update
from .clip import FactorUpdate, StepFactor, factor_of
from .columns import state_columns
from .gather import Grads, Member, Members, create, members, reduced, sharded
from .launch import Bucket, Update
from .numbers import DeviceNumbers
from .rule_optimizer import RuleOptimizer, number_names, whole
from .scalars import Ahead
from .seen import Found, Picks, Seen

#: Whether a member's numbers stay on the device, given addresses of numbers that several parameters share.
OnDevice = Callable[[Member, set[int]], bool]
#: Gradients of shards if no parameter is a DTensor.
NO_SHARDS: Grads = {}


class Plan(NamedTuple):
    """What eager, captured and preallocated steps make before their first launch.  The optimizer is still unchanged.

    Attributes:
        optimizer: whose members they are.
        fresh: members whose new state is still to be put into ``optimizer.state``.
        ready: the arenas of state.
        seen: what later steps compare state and groups with.
        launches: each bucket with its members, in the order of the launches.
        factor: by what they multiply gradients; None: they take them as they are.
    """

    optimizer: RuleOptimizer
    fresh: tuple[Member, ...]
    ready: ReadyArenas
    seen: Seen
    launches: list[tuple[Bucket, list[Member]]]
    factor: StepFactor | None

    @classmethod
    def of(
        cls,
        optimizer: RuleOptimizer,
        members: Members,
        on_device: OnDevice,
        shards: Grads = NO_SHARDS,
        factor: StepFactor | None = None,
        turns: Mapping[int, int] | None = None,
    ) -> Plan:
        """Return the plan for members that have passed all checks.

        Args:
            optimizer: whose members they are.
            members: these, and all that a later step will compare its own with.
            on_device: whether a member's numbers stay on the device.
            shards: local gradients of DTensors.
            factor: by what gradients are multiplied, if they are.
            turns: see :class:`Bucket`.

        Raises:
            ValueError, TypeError: tensors do not fit together; see :class:`Bucket`.
            MemoryError, torch.OutOfMemoryError: there is no room for new state.
        """
        found = members.found
        fresh = tuple([m for m in found if m.is_new or m.missing or m.moved])
        create(optimizer, found)
        # Before the tables read addresses: if somebody moves state in between, the next step notices.
        seen = Seen(optimizer, members)
        ready = optimizer.store.make_ready()
        launches = _partition(optimizer, found, shards, on_device, factor, turns)
        if factor is not None:
            factor.bind(launches)
        return cls(optimizer, fresh, ready, seen, launches, factor)

    def prepare(self, shards: Grads = NO_SHARDS) -> list[tuple[Bucket, list[Member], Update]]:
        """Return each launch of a step that has a gradient, with its members, as a value; nothing changes."""
        ahead: Ahead = {}
        found = []
        for bucket, of in self.launches:
            update = bucket.prepare(self.optimizer, bucket.tensors_of(of), bucket.numbers_of(of), ahead, shards)
            if update is not None:
                found.append((bucket, of, update))
        return found


def _partition(
    optimizer: RuleOptimizer,
    members: Sequence[Member],
    shards: Grads,
    on_device: OnDevice,
    factor: StepFactor | None,
    turns: Mapping[int, int] | None,
) -> list[tuple[Bucket, list[Member]]]:
    """Divide members into launches.  Duplicates and parameters that share memory go into later launches."""
    memory = _memories(members)
    if len(set(memory)) < len(memory) or any(m.rule.carried for m in members):
        _take_turns(members, memory)
    found: dict[tuple[Any, ...], list[Member]] = {}
    formats_of = _FormatsOf()
    numbers = Counter(m.entry[name].data_ptr() for m in members for name in number_names(optimizer, m.rule))
    shared = {address for address, uses in numbers.items() if uses > 1}
    for member in sorted(members, key=attrgetter("turn")):
        stays = on_device(member, shared)
        alike = stays, member.turn, member.rule, member.param.device, formats_of(member)
        found.setdefault(alike, []).append(member)
    launches = [*found.items()]
    if not shared:  # else each launch takes the number that the one before it has left
        # Small ones first: the first module that reads a bias does not wait for all matrices of the model.
        launches.sort(key=lambda launch: (launch[0][1], sum(m.param.numel() for m in launch[1])))
    made = []
    for (stays, *_), each in launches:
        its_factor = None if factor is None else factor.on(each[0].shard.device)
        made.append((Bucket(optimizer, each, shared, shards, stays, its_factor, turns), each))
    return made


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
    """Give members that share memory or a number increasing turns: each reads the results of the one before."""
    free: dict[tuple[str, int], int] = {}  # the first turn in which nobody uses it any more
    for member, its_memory in zip(members, memory, strict=True):
        uses = [("memory", its_memory), *(("number", member.entry[name].data_ptr()) for name in member.rule.carried)]
        member.turn = max(member.turn, *(free.get(one, 0) for one in uses))
        free.update(dict.fromkeys(uses, member.turn + 1))


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


def preallocate(optimizer: RuleOptimizer, index: int) -> None:
    """Make the state of group ``index``, the ring that its pages pass through, and its kernels.

    ``optimizer.state`` gets it in the first step in which a parameter has a gradient, as without.  Parameters that
    require no gradient now, or have state, get none.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no room; nothing has been made.
        CompileError: a kernel cannot be compiled.
    """
    group = optimizer.param_groups[index]
    rule = optimizer.rule_of(group)
    check_rule(rule)
    check_update(rule)
    names = number_names(optimizer, rule)
    found = []
    for i, p in enumerate(group["params"]):
        made = p in optimizer.preallocated or optimizer.state.get(p)
        if p.requires_grad and known(real_dtype(p.dtype)) and not made:
            columns = state_columns(optimizer, rule.inputs[2:], p, group)
            form, missing = optimizer.form_of(p), [*names, *columns]
            found.append(Member(p, index, rule, {}, columns, i, local(p), is_new=True, missing=missing, form=form))
    if not found:
        return
    everyone = Members(found, [], (), (), ())
    plan = Plan.of(optimizer, everyone, on_device(optimizer), factor=factor_of(optimizer))
    for bucket, of in plan.launches:
        bucket.compile(of[0].formats)
    if plan.factor is not None:
        plan.factor.prepare(optimizer)
    store = optimizer.store
    for device in {m.param.device for m in found if m.param.is_cuda}:
        if any(arena.way(store.host_access) == "staged" for arena in store.on(device)):
            store.ring(device)
    compiled_look()  # loads it now, if it has been compiled
    optimizer.preallocated.update((m.param, m.entry) for m in found)
    optimizer.warm = True
