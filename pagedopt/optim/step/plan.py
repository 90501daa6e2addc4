"""A plan: some members with all their state, made where it was missing, and cut into launches with their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ...formats.format import Format
from ...placements.ready_arenas import ReadyArenas
from ...tables.columns import is_dense
from ..state.rule_optimizer import RuleOptimizer, number_names
from ..state.scalar_state import Ahead
from .bucket import Bucket
from .factor import StepFactor
from .members import Grads, Member, Members
from .new_state import create
from .seen import Seen
from .update import Update

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
