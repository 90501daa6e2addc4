"""Compare ``optimizer.state`` and ``param_groups`` with the objects for which the last step was prepared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch

from ..system.compare_tensors import addresses, identities, layouts
from ..tables.tensors import Tensors, is_sharded, local
from .gather import Member, Members
from .rule_optimizer import RuleOptimizer

_params, _grad, _format = itemgetter("params"), attrgetter("grad"), methodcaller("get", "state_format")
#: Takes some items of a tuple.
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Found(NamedTuple):
    """The tensors of a step: all parameters, their gradients, and the values of state that are compared."""

    params: tuple[torch.Tensor, ...]
    grads: Tensors
    values: tuple[Any, ...]


class Picks(NamedTuple):
    """What selects the tensors of a launch: rows from parameters and from gradients, the others from values."""

    rows: Pick
    state: Pick
    numbers: Pick


class Seen:
    """What a step was prepared for: groups, their parameters, the keys of ``optimizer.state``, and its values.

    :meth:`compare` notices a state entry or tensor that was deleted or replaced, and a state tensor whose ``.data`` or
    storage was replaced, shared or resized to nothing.  Addresses and strides of parameters and gradients are compared
    by the tables (:meth:`PointerTable.look`).  New values in the same tensor change nothing here.  A compiled look has
    all of it in one call (``system/look.cpp``).

    Nothing is kept alive, and no tensor is referred to, not even weakly: ``torch.utils.swap_tensors`` refuses tensors
    with weak references.  Objects are known by id, which another object may have once the first has died.  What a
    launch then uses is still what it would use of the first:

    * A parameter or gradient: the tables compare its type, dtype, device, shape, strides and address in each step.
    * State: its storage is known by a weak reference, and once one of the storages has died, nothing matches any more.
      So what has the id and the address of a state tensor is in the memory that was looked at.  Layouts are compared
      where others have raised the version of state, as ``t_()`` does.  (That of a ``.data`` over the same memory goes
      unnoticed here, not by a compiled look.)

    Lists and dicts may be replaced by others with the same contents.

    Attributes:
        dead: references to storages of state that have died.
        names_by_key: for each key of ``optimizer.state``, the names of the values that are compared.
    """

    def take(self, optimizer: RuleOptimizer, members: Members) -> tuple[Found, dict[int, int]]:
        """Note what a step over these members is prepared for; new state may be nowhere but in them yet.

        Returns:
            the tensors of the step; and the index of each key of state, by its id.
        """
        self._rules, self._lengths, self._waiting = members.rules, members.lengths, tuple(members.waiting)
        self._formats = (*map(optimizer.formats_depend_on, optimizer.param_groups),)
        self._asked = any(self._formats)
        entries: dict[int, dict[str, Any]] = {}
        names: dict[int, tuple[str, ...]] = {}
        alike: dict[tuple[str, ...], tuple[str, ...]] = {}  # one tuple for thousands of parameters
        for m in members.found:
            entries[id(m.param)] = m.entry
            before = names.get(id(m.param), ())  # in another group, perhaps with another rule
            used = (*dict.fromkeys((*before, *m.columns, *m.numbers)),)
            names[id(m.param)] = alike.setdefault(used, used)
        keys = (*dict.fromkeys((*optimizer.state, *(m.param for m in members.found if m.entry))),)
        # The same objects for the same names, alive here: a compiled look knows them by their ids.
        self.names_by_key = tuple([names.get(id(key), ()) for key in keys])
        self._alike = self.names_by_key[0] if len({*self.names_by_key}) == 1 else None
        values = self._values([entries.get(id(key), {}) for key in keys])
        self._sharded = any(map(is_sharded, members.params))  # whose state is placed as they are
        memories = (*map(local, values),) if self._sharded else values
        # Before the tables read addresses: if somebody moves state in between, the next step notices.
        self._at = addresses(memories, sure=False)
        self._layouts, self._by_others = layouts(memories), optimizer.store.versions.by_others()
        self._keys, self._ids = identities((*members.params, *keys)), identities(values)
        self.dead: list[object] = []
        storages = {id(s): s for s in map(torch.Tensor.untyped_storage, memories)}
        self._storages = tuple([weakref.ref(storage, self.dead.append) for storage in storages.values()])
        at = {id(key): i for i, key in enumerate(keys)}
        return Found(members.params, (*map(_grad, members.params),), values), at

    def _values(self, entries: Iterable[Any]) -> tuple[Any, ...]:
        """Return the values ordered by name if all entries have the same names, else entry by entry."""
        if (alike := self._alike) is not None:
            return tuple([entry[name] for name in alike for entry in entries])
        return tuple([entry[name] for entry, of in zip(entries, self.names_by_key, strict=True) for name in of])

    def picks(
        self, members: Sequence[Member], keys: Sequence[str], names: Sequence[str], at: Mapping[int, int]
    ) -> Picks:
        """Return what selects the tensors of a launch over members, whose state has these keys and numbers.

        For ``at`` see :meth:`take`.
        """
        where = [at[id(m.param)] for m in members] if keys or names else []
        by_key = self.names_by_key
        if (alike := self._alike) is not None:
            count = len(by_key)
            found = [[alike.index(name) * count + i for name in each for i in where] for each in (keys, names)]
        else:
            ends = [*accumulate(map(len, by_key), initial=0)]
            found = [[ends[i] + by_key[i].index(name) for name in each for i in where] for each in (keys, names)]
        return Picks(*map(_pick, ([m.index for m in members], *found)))

    def same_rules(self, optimizer: RuleOptimizer) -> bool:
        """Return whether groups ask for the same rules and formats."""
        groups = optimizer.param_groups
        if (*map(optimizer.update_of, groups),) != self._rules:
            return False
        # Where no format was or is asked for, nothing is called.
        if optimizer.state_format is None and not self._asked and not any(map(_format, groups)):
            return True
        return (*map(optimizer.formats_depend_on, groups),) == self._formats

    def compare(self, optimizer: RuleOptimizer) -> Found | None:
        """Return all tensors of the step; None: an object is new, or state has moved."""
        if self.dead or not self.same_rules(optimizer):
            return None
        groups, state = optimizer.param_groups, optimizer.state
        params = (*chain.from_iterable(map(_params, groups)),)
        if len(groups) > 1 and (*map(len, map(_params, groups)),) != self._lengths:
            return None
        if identities((*params, *state)) != self._keys:
            return None
        try:
            values = self._values(state.values())
        except (LookupError, TypeError, ValueError, AttributeError):  # an entry lacks a value, or is no dict
            return None
        if identities(values) != self._ids:
            return None
        memories = (*map(local, values),) if self._sharded else values
        if addresses(memories) != self._at:
            return None
        if (by_others := optimizer.store.versions.by_others()) != self._by_others:
            if layouts(memories) != self._layouts:
                return None
            self._by_others = by_others
        if self._waiting and any(params[i].grad is not None for i in self._waiting):
            return None
        return Found(params, (*map(_grad, params),), values)


def _pick(positions: list[int]) -> Pick:
    """Return a function that takes the items at these positions of a tuple, as a tuple."""
    first = positions[0] if positions else 0
    if positions == [*range(first, first + len(positions))]:
        return itemgetter(slice(first, first + len(positions)))
    return itemgetter(*positions)
