"""A plan: some members with all their state, made where it was missing, and cut into launches with their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...placements.ready_arenas import ReadyArenas
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import Ahead
from .bucket import Bucket, KindOf
from .changes import KnownObjects
from .members import Grads, Member, Members
from .new_state import create
from .update import Update

#: Gradients of shards if no parameter is a DTensor.
NO_SHARDS: Grads = {}


class Plan(NamedTuple):
    """What eager, captured and preallocated steps make before their first launch.  The optimizer is still unchanged.

    Attributes:
        optimizer: whose members they are.
        fresh: members whose new state is still to be put into ``optimizer.state``.
        ready: the arenas of state.
        objects: what later steps compare state and groups with; None for captured and preallocated steps.
        launches: each bucket with its members, in the order of the launches.
    """

    optimizer: RuleOptimizer
    fresh: tuple[Member, ...]
    ready: ReadyArenas
    objects: KnownObjects | None
    launches: list[tuple[Bucket, list[Member]]]

    @classmethod
    def of(
        cls,
        optimizer: RuleOptimizer,
        found: Sequence[Member],
        kind: KindOf,
        shards: Grads = NO_SHARDS,
        everyone: Members | None = None,
    ) -> Plan:
        """Return the plan for members that have passed all checks.

        Args:
            optimizer: whose members they are.
            found: the members.
            kind: the class of a member's bucket.
            shards: local gradients of DTensors.
            everyone: all parameters, if later steps will compare theirs with them.

        Raises:
            ValueError, TypeError: tensors do not fit together; see :class:`Bucket`.
            MemoryError, torch.OutOfMemoryError: there is no room for new state.
        """
        fresh = tuple([m for m in found if m.is_new or m.missing or m.moved])
        create(optimizer, found)
        # Before the tables read addresses: if somebody moves state in between, the next step notices.
        objects = None if everyone is None else KnownObjects(optimizer, everyone)
        ready = optimizer.store.make_ready()
        launches = Bucket.partition(optimizer, found, shards, kind)
        if objects is not None:
            objects.pick_for(launches)
        return cls(optimizer, fresh, ready, objects, launches)

    def prepare(self, shards: Grads = NO_SHARDS) -> list[tuple[Bucket, list[Member], Update]]:
        """Return each launch of a step that has a gradient, with its members, as a value; nothing changes."""
        ahead: Ahead = {}
        found = []
        for bucket, of in self.launches:
            update = bucket.prepare(self.optimizer, bucket.tensors_of(of), bucket.numbers_of(of), ahead, shards)
            if update is not None:
                found.append((bucket, of, update))
        return found
