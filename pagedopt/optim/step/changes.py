"""Compare ``optimizer.state`` and ``param_groups`` with the objects for which the last step was prepared."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch

from ...system.compare_tensors import Contents, identities
from ...tables.columns import Tensors
from ...tables.shards import is_sharded, local
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import number_names
from .bucket import Bucket
from .members import Member, Members, interned

_params, _grad = itemgetter("params"), attrgetter("grad")
#: Takes some items of a tuple.
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class KnownObjects:
    """The parameters, keys of ``optimizer.state`` and state values that a step was prepared for.

    :meth:`compare` notices a state entry or tensor that was deleted or replaced, and a state tensor whose ``.data`` or
    storage was replaced, shared or resized to nothing.  Addresses and strides of parameters and gradients are compared
    by the tables (:meth:`PointerTable.look`).  New values in the same tensor change nothing here.

    Nothing is kept alive, and no tensor is referred to, not even weakly: ``torch.utils.swap_tensors`` refuses tensors
    with weak references.  Objects are known by id, which another object may have once the first has died.  What a
    launch then uses is still what it would use of the first:

    * A parameter or gradient: the tables compare its type, dtype, device, shape, strides and address in each step.
    * State: its storage is known by a weak reference, and once one of the storages has died, nothing matches any more.
      So what has the id and the address of a state tensor is in the memory that was looked at.  (Another layout of
      that memory goes unnoticed, whether a new tensor has it or the same one, as after ``t_()``.)

    Lists and dicts may be replaced by others with the same contents.

    Attributes:
        picks: for each bucket, two functions that select its tensors and its numbers from what :meth:`compare` returns.
    """

    __slots__ = (
        "__weakref__", "_contents", "_dead", "_formats", "_lengths", "_params", "_positions", "_rules", "_storages",
        "_takes_state", "_waiting", "picks",
    )  # fmt: skip

    def __init__(self, optimizer: RuleOptimizer, members: Members) -> None:
        self._rules, self._lengths, self._waiting = members.rules, members.lengths, tuple(members.waiting)
        self._formats = (*map(optimizer.formats_depend_on, optimizer.param_groups),)
        entries: dict[int, dict[str, Any]] = {}
        names: dict[int, tuple[str, ...]] = {}
        for m in members.found:
            entries[id(m.param)] = m.entry
            used = interned((*m.columns, *number_names(optimizer, m.rule)))
            if (before := names.setdefault(id(m.param), used)) is not used:  # in another group, with another rule
                names[id(m.param)] = tuple(dict.fromkeys((*before, *used)))
        there = {*map(id, optimizer.state)}
        new = {id(m.param): m.param for m in members.found if m.entry and id(m.param) not in there}
        keys = (*optimizer.state, *new.values())
        compared = [names.get(id(key), ()) for key in keys]
        content = [entries.get(id(key), {}) for key in keys]
        values = [entry[name] for entry, of in zip(content, compared, strict=True) for name in of]
        # Contents reads addresses before the tables do: if somebody moves state in between, the next step notices.
        sharded = any(map(is_sharded, values))
        self._contents = Contents(keys, content, compared, local if sharded else None)
        self._params = identities(members.params)
        self._dead: list[object] = []
        note, shards = self._dead.append, map(local, values) if sharded else values
        storages = {id(s): s for s in map(torch.Tensor.untyped_storage, shards)}
        self._storages = tuple([weakref.ref(storage, note) for storage in storages.values()])
        self._positions = self._contents.positions([*map(id, keys)])

    def pick_for(self, buckets: Sequence[tuple[Bucket, Sequence[Member]]]) -> None:
        """Set :attr:`picks` for these buckets and their members; to be called once, before :meth:`compare`."""
        self._takes_state = any(bucket.takes_state for bucket, _ in buckets)
        total, picks, positions = sum(self._lengths), [], self._positions
        for bucket, members in buckets:
            tensors, numbers = [m.index for m in members], []
            tensors += [total + index for index in tensors]
            if self._takes_state:
                tensors += [2 * total + positions[id(m.param), key] for key in bucket.keys for m in members]
                numbers = [2 * total + positions[id(m.param), name] for name in bucket.names for m in members]
            pair = _pick(tensors), _pick(numbers)
            picks.append(pair if len(members) > 1 else interned(pair))
        self.picks: tuple[tuple[Pick, Pick], ...] = tuple(picks)
        del self._positions

    def same_rules(self, optimizer: RuleOptimizer) -> bool:
        """Return whether state is alive, and groups ask for the same rules and formats."""
        groups, rules = optimizer.param_groups, self._rules
        if self._dead or len(groups) != len(rules):
            return False
        asked = optimizer.state_format is not None or any(self._formats)
        for i, group in enumerate(groups):
            if optimizer.rule_of(group) is not rules[i]:
                return False
            asked = asked or bool(group.get("state_format"))
        # Where no format was or is asked for, nothing is called.
        return not asked or (*map(optimizer.formats_depend_on, groups),) == self._formats

    @property
    def lives(self) -> bool:
        """Whether no storage of state has died."""
        return not self._dead

    @property
    def names_by_key(self) -> tuple[tuple[str, ...], ...]:
        """For each key of ``optimizer.state``, the names of the values that :meth:`compare` compares."""
        return self._contents.names

    def compare(self, optimizer: RuleOptimizer) -> Tensors | None:
        """Return parameters, gradients and (if a bucket takes it) state; None: an object is new, or state has moved."""
        groups = optimizer.param_groups
        if not self.same_rules(optimizer):
            return None
        if len(groups) == 1:
            params = (*groups[0]["params"],)
        elif (*map(len, map(_params, groups)),) != self._lengths:
            return None
        else:
            params = (*chain.from_iterable(map(_params, groups)),)
        if identities(params) != self._params:
            return None
        values = self._contents.find(optimizer.state, self._takes_state)
        if values is None or (self._waiting and any(params[i].grad is not None for i in self._waiting)):
            return None
        return (*params, *map(_grad, params), *values) if self._takes_state else (*params, *map(_grad, params))


def _pick(positions: list[int]) -> Pick:
    """Return a function that takes the items at these positions of a tuple, as a tuple."""
    first = positions[0] if positions else 0
    if positions == [*range(first, first + len(positions))]:
        return _stretch(first, first + len(positions))
    return itemgetter(*positions)


@functools.lru_cache(maxsize=256)
def _stretch(first: int, last: int) -> Pick:
    """Return a function that takes items ``first`` to ``last - 1``; cached, as there may be thousands alike."""
    return itemgetter(slice(first, last))


__all__ = ["KnownObjects", "Pick"]
