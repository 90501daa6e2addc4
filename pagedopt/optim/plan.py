"""A plan of steps: rows with all their state, cut into launches; and a step, prepared as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ..formats.floating import known, real_dtype
from ..formats.format import Format
from ..placements.store import ReadyArenas
from ..system.interrupts import Uninterrupted
from ..system.look import compiled_look
from ..tables.tensors import is_dense, is_sharded, local_grad
from .clip import FactorUpdate, StepFactor, factor_of
from .gather import Grads, Member, Members, create, members
from .launch import Launch, Work
from .numbers import DeviceNumbers
from .rule_optimizer import RuleOptimizer, whole
from .scalars import Ahead
from .seen import Found, Seen

#: Whether a member's numbers stay on the device, given addresses of numbers that several parameters share.
OnDevice = Callable[[Member, set[int]], bool]
#: Gradients of shards if no parameter is a DTensor.
NO_SHARDS: Grads = {}


class Plan(NamedTuple):
    """What steps over the same objects have in common: tables, and what a step compares to know if they still fit.

    It keeps no tensor alive, but for new state until the first step has put it into the optimizer.

    Attributes:
        seen: the objects.
        launches: they, each with its table.
        residents: how many pages of each arena were on the device.
        sharded: indices of parameters that are DTensors.
        factor: by what gradients are multiplied; None: they are taken as they are.
        fresh: members whose new state is still to be put into ``optimizer.state``.
    """

    seen: Seen
    launches: tuple[Launch, ...]
    residents: tuple[int, ...]
    sharded: tuple[int, ...]
    factor: StepFactor | None
    fresh: tuple[Member, ...]

    @classmethod
    def of(
        cls,
        optimizer: RuleOptimizer,
        members: Members,
        on_device: OnDevice,
        factor: StepFactor | None,
        shards: Grads = NO_SHARDS,
        turns: Mapping[int, int] | None = None,
    ) -> tuple[Plan, Found, ReadyArenas]:
        """Return the plan for members that have passed all checks, and the tensors and arenas of its first step.

        Eager, captured and preallocated steps are made of it.  The optimizer is still unchanged.

        Args:
            optimizer: whose members they are.
            members: these, and all that a later step will compare its own with.
            on_device: whether a member's numbers stay on the device.
            factor: by what gradients are multiplied, if they are.
            shards: local gradients of DTensors.
            turns: see :class:`Launch`.

        Raises:
            ValueError, TypeError: tensors do not fit together; see :class:`Launch`.
            MemoryError, torch.OutOfMemoryError: there is no room for new state.
        """
        fresh = tuple([m for m in members.found if m.is_new or m.missing or m.moved])
        create(optimizer, members.found)
        # Before the tables read addresses: if somebody moves state in between, the next step notices.
        seen = Seen()
        found, at = seen.take(optimizer, members)
        ready = optimizer.store.make_ready()
        launches = []
        for stays, shared, part in _partition(optimizer, members.found, on_device):
            its_factor = None if factor is None else factor.on(part[0].shard.device)
            launches.append((Launch(optimizer, part, seen, at, shared, shards, stays, its_factor, turns), part))
        if factor is not None:
            factor.bind(launches)
        return (
            cls(seen, tuple([launch for launch, _ in launches]), ready.residents, members.sharded, factor, fresh),
            found,
            ready,
        )

    def prepare(self, optimizer: RuleOptimizer, found: Found, ready: ReadyArenas, shards: Grads = NO_SHARDS) -> Step:
        """Prepare a step over the tensors that were ``found``; the optimizer does not change.

        Raises:
            ValueError, TypeError: a tensor has changed: only another plan can tell whether it can be used.
            CompileError: the kernel cannot be compiled.
        """
        ahead: Ahead = {}
        work = []
        for launch in self.launches:
            if (its_work := launch.prepare(optimizer, found, ahead, shards)) is not None:
                work.append(its_work)
        factor = None if self.factor is None else self.factor.prepare(optimizer)
        return Step(optimizer, tuple(work), self, ready, factor)

    def still_holds(self, optimizer: RuleOptimizer) -> bool:
        """Return whether all tensors are what the tables were made for and lie where the tables say."""
        found = self.seen.compare(optimizer)
        return found is not None and all(launch.still_holds(found) for launch in self.launches)


def _partition(
    optimizer: RuleOptimizer, members: Sequence[Member], on_device: OnDevice
) -> list[tuple[bool, set[int], list[Member]]]:
    """Divide members into launches.  Duplicates and parameters that share memory go into later launches.

    Returns:
        for each launch whether its numbers stay on the device, addresses of numbers that several parameters share, and
        its members.
    """
    memory = _memories(members)
    if len(set(memory)) < len(memory) or any(m.rule.carried for m in members):
        _take_turns(members, memory)
    found: dict[tuple[Any, ...], list[Member]] = {}
    of_alike: dict[tuple[object, ...], int] = {}  # equal formats have one number
    numbered: dict[tuple[Format, ...], int] = {}
    numbers = Counter([m.entry[name].data_ptr() for m in members for name in m.numbers])
    shared = {address for address, uses in numbers.items() if uses > 1}
    for member in sorted(members, key=attrgetter("turn")):
        stays = on_device(member, shared)
        p, dtypes = member.param, [member.entry[key].dtype for key in member.columns]
        alike = id(member.columns), p.dtype, None if p.grad is None else p.grad.dtype, *dtypes
        if (number := of_alike.get(alike)) is None:
            number = of_alike[alike] = numbered.setdefault(member.formats, len(numbered))
        found.setdefault((stays, member.turn, member.rule, p.device, number), []).append(member)
    launches = [*found.items()]
    if len(launches) > 1 and not shared:  # else each launch takes the number that the one before it has left
        # Small ones first: the first module that reads a bias does not wait for all matrices of the model.
        launches.sort(key=lambda launch: (launch[0][1], sum(m.param.numel() for m in launch[1])))
    return [(stays, shared, each) for (stays, *_), each in launches]


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


class Step(NamedTuple):
    """A step after all checks, allocations and compilation, before its launches.  The optimizer is still unchanged.

    It is a value: it may be printed, run later, or dropped.

    Attributes:
        optimizer: whose step it is.
        work: of the launches, in their order.
        plan: whose step it is, too.
        ready: the arenas of state, and how many of their pages are resident.
        factor: by what gradients are multiplied; None: they are taken as they are.
    """

    optimizer: RuleOptimizer
    work: tuple[Work, ...]
    plan: Plan
    ready: ReadyArenas
    factor: FactorUpdate | None = None

    def run(self, queue: Callable[[Step], object] | None = None) -> Plan:
        """Take the step.  Once its first launch has begun, it is finished and counted before a signal is handled.

        Args:
            queue: queues the work, and counts it; None: it is carried out now, on the current stream.

        Returns:
            the plan of the next steps.

        Raises:
            RuntimeError: another step has been prepared since, with other numbers or tensors; nothing was done.
            BaseException: a launch failed, or a second Ctrl-C came in the middle; the optimizer is then damaged.
        """
        for each in self.work:
            if each.launch.sweep.table.host.stamp != each.stamp:
                raise RuntimeError("another step was prepared since; prepare this one again")
            each.launch.sweep.begun = False
        fresh = self.plan.fresh
        with Uninterrupted(gives_way=True), whole(self.optimizer, "a step", self._begun):
            try:
                if self.carry_out(queue) and fresh:  # a first step that is left out leaves no state, as torch's default
                    put_state(self.optimizer, fresh)
            except BaseException:
                if self._begun():  # it may hold new values: the next step must not take it for state of zeros
                    put_state(self.optimizer, fresh)
                raise
        return self.plan._replace(fresh=()) if fresh else self.plan

    def carry_out(self, queue: Callable[[Step], object] | None = None) -> bool:
        """Compute the factor, and do the work, or queue it (see :meth:`run`); return whether there was any."""
        work = self.work
        if self.factor is not None:  # first: a step under the forward forks from the current stream then
            work = self.factor.compute(self.optimizer, work)
        if queue is not None and work:
            queue(self if work is self.work else self._replace(work=work))
        else:
            for each in work:
                each.run(self.ready.arenas)
        return bool(work)

    def _begun(self) -> bool:
        """Whether a launch has begun: part of the state may be new."""
        return any(each.launch.sweep.begun for each in self.work)


class Coming(NamedTuple):
    """Gradients that will come one by one.

    Attributes:
        expected: ids of their parameters.
        turns: when each is expected, by the number of its parameter.
    """

    expected: frozenset[int]
    turns: Mapping[int, int]


def prepare_anew(optimizer: RuleOptimizer, shards: Grads, coming: Coming | None = None) -> Step:
    """Prepare a step for the current contents of state and groups, and make the state that is missing.

    Args:
        coming: gradients that are not there yet; None: all are.  Such a step has no factor, and is not to be run: its
            work is that of parameters that can be updated one by one.

    Raises:
        KeyError, RuntimeError, ValueError, TypeError: see :func:`members` and :class:`Launch`.
        MemoryError, torch.OutOfMemoryError: there is no room for new state.
        CompileError: a kernel cannot be compiled.
    """
    everyone = members(optimizer, coming.expected if coming else ())
    factor, turns = (None, coming.turns) if coming else (factor_of(optimizer), None)
    plan, found, ready = Plan.of(optimizer, everyone, on_device(optimizer), factor, shards, turns)
    return plan.prepare(optimizer, found, ready, shards)


def on_device(optimizer: RuleOptimizer) -> OnDevice:
    """Return the function that tells whether a member's numbers stay on the device.

    Step counts that lie on a device, as with ``fused``, are read there in each step, and the host waits for none.
    """

    def stay(member: Member, shared: set[int]) -> bool:
        names = member.numbers
        leaves_out = optimizer.scaled or optimizer.skip_nonfinite
        asked = names or leaves_out or optimizer.param_groups[member.group].get("capturable")
        return bool(asked) and DeviceNumbers.takes(member, names, shared)

    return stay


def grads_of_shards(optimizer: RuleOptimizer, known: Plan | None, found: Found | None) -> Grads:
    """Return local gradients of DTensors; a collective call, which every process makes once in each step.

    Raises:
        RuntimeError: a gradient is not a DTensor (as torch).
    """
    if known is None or found is None:
        params = [p for group in optimizer.param_groups for p in group["params"] if is_sharded(p)]
    else:
        params = [found.params[i] for i in known.sharded]
    return {p: grad for p in dict.fromkeys(params) if (grad := local_grad(p)) is not None}


def put_state(optimizer: RuleOptimizer, fresh: tuple[Member, ...]) -> None:
    """Put new state into ``optimizer.state``."""
    for member in fresh:
        entry = optimizer.state[member.param]
        for name, value in member.entry.items():
            if entry.get(name) is None or name in member.moved:
                entry[name] = value
        optimizer.preallocated.pop(member.param, None)


def preallocate(optimizer: RuleOptimizer, index: int, of: Container[int] | None = None) -> None:
    """Make the state of group ``index``, the ring that its pages pass through, and its kernels.

    ``optimizer.state`` gets it in the first step in which a parameter has a gradient, as without.  Parameters that
    require no gradient now get none.

    Args:
        of: ids of the parameters that lack state, or part of it; None: those without any.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no room; nothing has been made.
        CompileError: a kernel cannot be compiled.
    """
    params = [p for p in optimizer.param_groups[index]["params"] if p.requires_grad and known(real_dtype(p.dtype))]
    lacks = (lambda p: not optimizer.state.get(p)) if of is None else (lambda p: id(p) in of)
    wanted = {id(p) for p in params if p not in optimizer.preallocated and lacks(p)}
    everyone = members(optimizer, wanted, only=index)
    if not (found := [m for m in everyone.found if id(m.param) in wanted]):
        return
    plan, *_ = Plan.of(optimizer, everyone._replace(found=found), on_device(optimizer), factor_of(optimizer))
    for launch in plan.launches:
        launch.compile()
    if plan.factor is not None:
        plan.factor.prepare(optimizer)
    store = optimizer.store
    for device in {m.param.device for m in found if m.param.is_cuda}:
        if any(arena.way(store.host_access) == "staged" for arena in store.on(device)):
            store.ring(device)
    compiled_look()  # loads it now, if it has been compiled
    optimizer.preallocated.update((m.param, m.entry) for m in found)
    optimizer.warm = True
